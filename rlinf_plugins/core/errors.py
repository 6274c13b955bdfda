"""One flat vocabulary of errors.

Every error says what was wrong, with which value, and what to do about it. ``RlinfError`` is the boundary: whatever
the suite raises on purpose derives from it, so that a caller can tell a reported failure from a defect.
Areas add their classes under their own heading; none is defined elsewhere.
"""


class RlinfError(Exception):
    """Base of everything the suite raises on purpose."""


# --- configuration and installation -----------------------------------------------------------------------------


class ConfigError(RlinfError, ValueError):
    """A configuration value is unknown, of the wrong type, out of range or in conflict with another."""


class MissingExtraError(RlinfError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class UnsupportedVersionError(RlinfError):
    """A dependency is installed in a version outside the tested range."""


class UnknownNameError(RlinfError, LookupError):
    """A name is not registered; the message lists those that are."""


class MissingAssetError(RlinfError, FileNotFoundError):
    """A file the feature needs is absent; the message says which and where it comes from."""


# --- veRL integration -------------------------------------------------------------------------------------------


class PluginNotLoadedError(RlinfError):
    """The veRL plugin did not attach in this process."""


class PatchRefusedError(RlinfError):
    """A patch of veRL does not match what is installed and was not applied."""


class RolloutFailedError(RlinfError):
    """More rollouts failed than the configuration allows; the message counts them by cause."""


class RolloutStalledError(RlinfError):
    """No rollout finished within the stall timeout; the message names what is still running."""


class RolloutWorkerDiedError(RlinfError):
    """A process that ran rollouts died; the message names it and its cause."""


# --- device lock and context switcher ---------------------------------------------------------------------------


class UnknownDeviceError(UnknownNameError):
    """A device is not one of the cluster's, or a set asks for more devices than there are."""


class DeviceSetError(RlinfError, ValueError):
    """A device set or a claim on it makes no sense: empty, a share without bytes, bytes beyond what is held."""


class ExceedsCapacityError(RlinfError):
    """What was asked for can never fit on a device; the message gives the numbers."""


class HoldAndWaitError(RlinfError):
    """An owner that holds devices asked to wait for more; the sets must be acquired all at once."""


class LockTimeoutError(RlinfError, TimeoutError):
    """Devices were not granted in time; the message says who holds them and who is ahead."""


class LockCancelledError(RlinfError):
    """A waiting request was withdrawn, or its owner was declared dead."""


class NotOwnerError(RlinfError):
    """A lease was released or used by someone who does not own it."""


class StaleTokenError(RlinfError):
    """A fencing token is older than one already seen, or its lease has ended; nothing was moved."""


class LockServiceError(RlinfError):
    """The lock's host cannot be reached, or it lost a lease while it restarted."""


class NotFreedError(RlinfError):
    """A resident was told to leave a device and its bytes are still there; the device was not handed on."""


class ResidentBytesError(RlinfError):
    """A resident occupies other than the bytes it declared."""


class ResidentStateError(RlinfError):
    """A resident was asked for something its state does not allow; the message says which state it is in."""


# --- models -----------------------------------------------------------------------------------------------------


class CheckpointError(RlinfError):
    """A checkpoint folder does not hold what the model needs; the message lists the keys or the file at fault."""


class InstructionError(RlinfError, ValueError):
    """A task instruction cannot be put into the prompt as it is."""


class ObservationError(RlinfError, ValueError):
    """An image, state or prompt handed to the policy has the wrong shape, type or range."""


# --- rollout ----------------------------------------------------------------------------------------------------


class RequestRejectedError(RlinfError, ValueError):
    """A rollout request can never be served as it is; other requests are not affected."""


class EngineStepError(RlinfError):
    """The model raised while it served the requests that get this error; its cause is attached."""


class NonFiniteLogitsError(RlinfError):
    """The model gave NaN or infinite logits for a request; other requests go on."""


class EngineBusyError(RlinfError):
    """Weights were to be written while requests are running; abort or drain them first."""


class WeightsNotLoadedError(RlinfError):
    """Generation was asked of a model whose weights were never synced, are half synced or were released."""


class WeightSyncError(RlinfError):
    """What a trainer sent does not fit the rollout model: unknown name, other shape, or a missing part."""


# --- environments ---------------------------------------------------------------------------------------------------


class RenderingSetupError(RlinfError):
    """A renderer cannot be chosen any more, or not at all, in this process."""


class BlankFrameError(RlinfError):
    """A simulator's renderer drew nothing."""


# --- tools ------------------------------------------------------------------------------------------------------


class ToolCallError(RlinfError):
    """A tool call failed and the caller asked for its value; carries the failure's kind and message."""


class CorpusError(RlinfError, ValueError):
    """A line of a corpus or question file is not what the format says; the message names file and line."""


class IndexVersionError(RlinfError):
    """An index on disk is absent, incomplete or belongs to another corpus or retriever."""


class PoolClosedError(RlinfError):
    """A pool was used after it was closed, or from another event loop than its own."""
