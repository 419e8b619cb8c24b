"""How the site reads our docstrings: an extension of griffe, which mkdocs.yml names."""

import re
from typing import Any

import griffe

# An example: from its first prompt to the next empty line.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


class Docstrings(griffe.Extension):
    """Shows examples as code, and the arguments of a class that has only ``__new__``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put an object's examples into fences."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Let ``__new__`` stand for ``__init__``, whose arguments griffe shows."""
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function) and "__init__" not in cls.members:
            cls.set_member("__init__", griffe.Function("__init__", parameters=new.parameters))
