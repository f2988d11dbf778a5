"""From an exception inside a graph to the user's line that the failing operator comes from."""

from __future__ import annotations

import linecache
from types import TracebackType

from torch import fx


def graph_origin(traceback: TracebackType | None) -> str | None:
    """Module and source line of the operator that a graph was running, as "layers.3.mlp (model.py:41)"; None if none was."""
    while traceback is not None:
        frame = traceback.tb_frame
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and frame.f_code.co_name == "forward":
            line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
            made = line.partition("=")[0].strip()
            for node in module.graph.nodes:
                if node.name == made:
                    source = node.meta.get("source")
                    words = [node.meta.get("module", ""), f"({source})" if source else ""]
                    return " ".join(word for word in words if word) or None
        traceback = traceback.tb_next
    return None
