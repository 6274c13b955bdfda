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


class TrainingJobError(RlinfError):
    """veRL's command, run as a child, ended with an error; the message ends with what it printed last."""


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


class EpisodeFailedError(RlinfError):
    """An episode ended without a result: its environment failed, or it was over before its first step."""


# --- environments ---------------------------------------------------------------------------------------------------


class RenderingSetupError(RlinfError):
    """A renderer cannot be chosen any more, or not at all, in this process."""


class BlankFrameError(RlinfError):
    """A simulator's renderer drew nothing."""


class EnvContractError(RlinfError):
    """An environment breaks the contract of ``rlinf_plugins.envs.protocol``; the message says which sentence of it."""


class EnvStartError(RlinfError):
    """An environment could not be made at all; the message carries the worker's own error."""


class RestartStormError(RlinfError):
    """A worker failed again and again without finishing an episode and is not restarted any more."""


class ActionError(RlinfError, ValueError):
    """Actions have the wrong shape or type for the pool, so that no environment can take them."""


class PoolUsageError(RlinfError):
    """The pool was asked for something its state does not allow: an unknown slot, a step before the first reset."""


class SnapshotError(RlinfError):
    """A snapshot cannot be taken or does not fit the environment."""


# --- tools ------------------------------------------------------------------------------------------------------


class ToolCallError(RlinfError):
    """A tool call failed and the caller asked for its value; carries the failure's kind and message."""


class CorpusError(RlinfError, ValueError):
    """A line of a corpus or question file is not what the format says; the message names file and line."""


class IndexVersionError(RlinfError):
    """An index on disk is absent, incomplete or belongs to another corpus or retriever."""


class PoolClosedError(RlinfError):
    """A pool was used after it was closed, or from another event loop than its own."""


class TokenAlignmentError(RlinfError):
    """Sampled tokens, their mask and their log-probs do not line up; training on them would be wrong."""


# --- scheduler: flow, profile, plan -------------------------------------------------------------------------------


class FlowError(RlinfError, ValueError):
    """A flow is not a usable graph: an unknown stage, a duplicate, a cycle without turns, spans that contradict it."""


class StageFailedError(RlinfError):
    """A worker of a running flow raised; the message names the worker, its error is the cause."""


class ClusterError(RlinfError, ValueError):
    """A cluster description is inconsistent, or the machines at hand are not the ones it describes."""


class ProfileError(RlinfError, ValueError):
    """A profile is empty, inconsistent, stale, or was measured on other hardware or another configuration."""


class PlanError(RlinfError, ValueError):
    """A plan cannot be read, evaluated or applied; the message names the stage or the resource."""


class InfeasiblePlanError(PlanError):
    """No placement satisfies the constraints; ``conflict`` is a smallest set that cannot hold together.

    Attributes:
        conflict: The constraints of that set, in words.
    """

    def __init__(self, message: str, conflict: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.conflict = conflict


# --- scheduler: data channel ------------------------------------------------------------------------------------


class ChannelError(RlinfError):
    """Base of what the data channel raises."""


class ChannelTimeoutError(ChannelError, TimeoutError):
    """A channel operation did not finish in its time; the message says what it was waiting for."""


class ChannelClosedError(ChannelError):
    """The channel was closed, so nothing can be put any more."""


class EndOfStreamError(ChannelError):
    """The channel was closed and everything in it was delivered."""


class UnknownChannelError(ChannelError, LookupError):
    """No channel of this name exists; the message lists those that do."""


class UnknownMemberError(ChannelError, LookupError):
    """A producer or consumer is not attached to this broker, e.g. because the broker was restarted."""


class ItemTooLargeError(ChannelError, ValueError):
    """An item can never fit the channel's bounds; the message has both numbers."""


class BatchTooLargeError(ChannelError, ValueError):
    """A batch can never be filled within the channel's bounds; the message has both numbers."""


class StaleDeliveryError(ChannelError):
    """A delivery was acknowledged after its lease had ended; its items belong to someone else now."""


class StaleProducerError(ChannelError):
    """A producer was replaced by a newer one of the same name."""


class SequenceGapError(ChannelError):
    """A producer's items arrived out of order, which would break first-in first-out; nothing was admitted."""


class WrongGroupError(ChannelError, ValueError):
    """A consumer of another group asked for this channel's items."""


class UnserialisableItemError(ChannelError, TypeError):
    """An item cannot be sent to another process; the message names the type and the cause."""


class UndecodableItemError(ChannelError):
    """An item that was delivered cannot be rebuilt in this process; it was handed back to the channel."""


class ItemLostError(ChannelError):
    """An item's tensors were on the GPU, or in the memory, of a producer that is gone; the item was set aside."""


class BrokerUnreachableError(ChannelError):
    """The process that hosts the channel does not answer."""


class JournalError(ChannelError):
    """A channel's journal cannot be written or read."""
