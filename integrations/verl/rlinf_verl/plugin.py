"""Entry point of group ``verl.plugins``: veRL imports this module in every process that imports veRL.

veRL is only partly initialised at that moment, so everything here is registered lazily, to run when the veRL module in
question is imported. Whatever goes wrong is recorded (veRL swallows it) and makes the first use fail.
"""

from rlinf_verl import handshake

try:
    from rlinf_verl import attach

    attach.attach()
except Exception as error:
    handshake.record_failure(error)
    from rlinf_verl import refuse

    refuse.install()
    raise
