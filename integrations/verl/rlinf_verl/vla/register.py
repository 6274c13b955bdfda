"""Imported by veRL wherever it reads an embodied model: ``model.external_lib=rlinf_verl.vla.register``.

Makes the model type known to transformers, and the training engine known to veRL.
"""

from types import ModuleType

import wrapt

from rlinf_plugins.models.openvla import config as _model_type  # noqa: F401  registers itself with transformers


def _register_engine(_: ModuleType) -> None:
    import rlinf_verl.vla.engine  # noqa: F401  registers itself


# Only processes that train import veRL's engines; policy servers do without them.
wrapt.register_post_import_hook(_register_engine, "verl.workers.engine.fsdp.transformer_impl")
