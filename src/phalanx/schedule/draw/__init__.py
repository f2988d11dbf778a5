"""A step as a picture: the order of a schedule, what was predicted or what ran, all by the same rules.

`picture` says what is drawn; `text`, `svg` and `html` draw it on a terminal, on paper and on a screen.
"""

from __future__ import annotations

from phalanx.schedule.draw.html import html
from phalanx.schedule.draw.picture import Picture, picture
from phalanx.schedule.draw.svg import svg
from phalanx.schedule.draw.text import draw, legend, text

__all__ = ["Picture", "draw", "html", "legend", "picture", "svg", "text"]
