"""One spelling for the names of GPUs, wherever they come from: users, NVML, the catalogue.

Used by routing alone. `NVIDIA A100-SXM4-80GB`, `a100-sxm4` and `A100_SXM4` all have the name `a100sxm4`;
memory in a name is not part of it.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final

#: Words of NVML and marketing names that tell nothing about the model.
_VENDOR_WORDS: Final = frozenset({"nvidia", "geforce", "tesla", "quadro", "gpu", "generation", "graphics"})
_VENDOR_PREFIX: Final = re.compile(r"^(?:nvidia|geforce|tesla|quadro)+(?=[a-z*?])")
_SEPARATORS: Final = re.compile(r"[\s\-_]+")
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9*?]")
#: `rtxa6000` is the official name of what everybody calls an A6000.
_RTX_A_SERIES: Final = re.compile(r"^rtx(?=a\d{3,4})")
#: Names that mean "any GPU".
ANY_NAMES: Final = frozenset({"any", "*", ""})


def words_of(name: str) -> list[str]:
    """Split a GPU's name at blanks, `-` and `_` into lower-case words, without the vendor's."""
    words = [word for word in _SEPARATORS.split(name.strip().lower()) if word]
    return [word for word in words if word not in _VENDOR_WORDS]


def normalise_name(name: str) -> str:
    """Return the one spelling of a GPU's name or glob; "" when it means any GPU."""
    joined = _NOT_IN_NAMES.sub("", "".join(words_of(name)))
    joined = _RTX_A_SERIES.sub("", _VENDOR_PREFIX.sub("", joined))
    return "" if joined in ANY_NAMES else re.sub(r"\*+", "*", joined)


def name_matches(globs: tuple[str, ...], names: tuple[str, ...]) -> bool:
    """Whether one of the normalised globs fits one of a GPU's names; no globs fit any GPU."""
    return not globs or any(fnmatchcase(name, glob) for glob in globs for name in names)
