"""What a broken plugin still does: make the use of its names fail with the recorded cause.

Kept to the standard library and to what veRL has already imported, since anything else may be what is broken.
"""

import sys
from typing import Any

from rlinf_verl import handshake


def install() -> None:
    """Make veRL's configuration check and trainer look-up raise while our trainer mode is asked for."""
    config_module: Any = sys.modules["verl.utils.config"]
    original = config_module.validate_config

    def validate_config(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config", args[0] if args else None)
        if config is not None and ("recipe" in config or config.trainer.v1.trainer_mode == "m2flow"):
            handshake.require()
        return original(*args, **kwargs)

    config_module.validate_config = validate_config
