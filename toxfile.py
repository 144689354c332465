"""What tox runs beside the list in tox.ini where CI=true: what a newcomer's machine is spared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from tox.config.loader.memory import MemoryLoader
from tox.config.types import EnvList
from tox.plugin import impl

if TYPE_CHECKING:
    from tox.config.sets import ConfigSet
    from tox.session.state import State

IN_CI: Final = ("browser", "tls", "vllm")


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Add to the default environments."""
    if os.environ.get("CI") == "true":
        (listed,) = (loader.load_raw("env_list", state.conf, None) for loader in core_conf.loaders)
        names = [name.strip() for name in listed.replace("\n", ",").split(",")]
        core_conf.loaders.insert(0, MemoryLoader(env_list=EnvList([*filter(None, names), *IN_CI])))
