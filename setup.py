"""The C core of the shared-memory transport. Without a compiler the package installs without it and CPU ranks talk over Gloo."""

import sys
from pathlib import Path

from setuptools import Extension, setup

CORE = Path("src/phalanx/comm/shm/core")

setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "phalanx.comm.shm._core",
            sources=sorted(map(str, CORE.glob("*.c"))),
            depends=sorted(map(str, CORE.glob("*.h"))),
            define_macros=[("Py_LIMITED_API", "0x030b0000")],
            py_limited_api=True,
            optional=True,
            # Without contraction a product and a sum round the same way on every instruction set.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"],
        )
    ]
    if sys.platform == "linux"
    else [],
)
