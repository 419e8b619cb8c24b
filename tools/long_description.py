"""The long description: the README, whose links are made to work where it stands alone.

An index of packages shows the README away from its repository, where a relative link leads nowhere.
With a `Repository` in pyproject.toml's `[project.urls]`, links and pictures lead there, to the tag
of this version. Without one, as now, a link becomes its own words, and pictures are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# An image or a link, unless it has an address of its own, or leads to a place on the same page.
_RELATIVE = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def long_description(readme: str, repository: str | None, version: str) -> str:
    """The README for an index of packages.

    >>> long_description("See [groups](docs/groups.md).", "https://host/us/it", "1.0.0")
    'See [groups](https://host/us/it/blob/v1.0.0/docs/groups.md).'
    >>> long_description("See [groups](docs/groups.md).", None, "1.0.0")
    'See groups.'
    """

    def one(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        if repository is not None:
            kind = "raw" if mark else "blob"
            return f"{mark}[{words}]({repository.rstrip('/')}/{kind}/v{version}/{target})"
        return "" if mark else words

    if repository is None:
        # A picture with what is said of it, and the line of links to begin with.
        readme = re.sub(r"^(?:!\[|\*\*\[)(?:.+\n)+\n", "", readme, flags=re.MULTILINE)
    # Code has brackets of its own.
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _RELATIVE.sub(one, part) for part in parts)


class LongDescription(MetadataHookInterface):
    """What hatchling calls when it builds."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(
            readme, metadata.get("urls", {}).get("Repository"), metadata["version"]
        )
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
