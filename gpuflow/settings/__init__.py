"""Every setting of gpuflow: its name, environment variable, default and unit.

Anyone may import this package; it imports only `gpuflow.errors`. Nothing else in gpuflow reads a setting from
`os.environ`: call `Settings.load()` once at an entry point and pass the object on.
"""

from gpuflow.settings.model import Origin, Settings, env_names
from gpuflow.settings.sources import mask_url

__all__ = ["Origin", "Settings", "env_names", "mask_url"]
