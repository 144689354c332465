"""Every setting of gpuflow: its name, environment variable, default and unit.

Anyone may import this package; it imports only `gpuflow.errors`. Nothing else in gpuflow reads a setting from
`os.environ`: call `Settings.load()` once at an entry point and pass the object on.
"""

from gpuflow.settings.model import Origin, Settings
from gpuflow.settings.sources import mask_url

__all__ = ["Origin", "Settings", "mask_url"]
