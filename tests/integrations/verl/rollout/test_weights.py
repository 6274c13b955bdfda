import numpy as np
import pytest
import torch

from rlinf_plugins.core.errors import WeightsNotLoadedError, WeightSyncError
from rlinf_verl.rollout.weights import BucketPacker, ResidentWeights


def buckets(named, size):
    packer = BucketPacker(size)
    out = [b for name, tensor in named for b in packer.add(name, tensor)]
    return out + list(packer.rest())


def sync(weights, named, version=1, size=1 << 20):
    weights.begin()
    for bucket in buckets(named, size):
        weights.write(bucket)
    weights.commit(version)


@pytest.fixture
def tied(make_model):
    return make_model(tie_word_embeddings=True)


@pytest.mark.parametrize("size", [64, 1000, 1 << 20])
def test_weights_arrive_as_sent_whatever_the_bucket(make_model, size):
    source, model = make_model(seed=3), make_model(seed=4)
    weights = ResidentWeights(model, loaded=False)
    pointers = [p.data_ptr() for p in model.parameters()]
    sent = list(source.state_dict().items())
    assert all(b.data.nbytes <= max(size, 16) for b in buckets(sent, size))
    sync(weights, sent, version=7, size=size)
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert weights.version == 7
    weights.require()


def test_dtype_is_the_rollouts_own(make_model):
    source, model = make_model(seed=3, dtype=torch.bfloat16), make_model(seed=4)
    sync(ResidentWeights(model, loaded=False), source.state_dict().items(), size=96)
    for name, tensor in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.float())


def test_columns_of_a_transposed_tensor_are_not_scrambled(make_model):
    model = make_model()
    named = {n: t.clone() for n, t in model.state_dict().items()}
    named["lm_head.weight"] = torch.randn(32, 61).T
    sync(ResidentWeights(model, loaded=False), named.items())
    assert torch.equal(model.lm_head.weight, named["lm_head.weight"])


def test_read_only_memory_of_the_object_store_is_accepted(make_model):
    source, model = make_model(seed=3), make_model(seed=4)
    weights = ResidentWeights(model, loaded=False)
    weights.begin()
    for bucket in buckets(source.state_dict().items(), 512):
        bucket.data.flags.writeable = False
        weights.write(bucket)
    weights.commit(1)
    assert torch.equal(model.lm_head.weight, source.lm_head.weight)


def test_either_name_of_a_tied_weight_is_enough(tied):
    named = {n: t for n, t in tied.state_dict().items() if n != "lm_head.weight"}
    sync(ResidentWeights(tied, loaded=False), named.items())


def test_a_sync_that_leaves_something_out_is_refused_and_the_model_is_not_usable(make_model):
    model = make_model()
    weights = ResidentWeights(model, loaded=True)
    named = {n: t for n, t in model.state_dict().items() if n != "model.norm.weight"}
    with pytest.raises(WeightSyncError, match=r"without model\.norm\.weight"):
        sync(weights, named.items())
    with pytest.raises(WeightsNotLoadedError, match="did not finish"):
        weights.require()
    sync(weights, model.state_dict().items(), version=2)
    weights.require()


def test_half_a_tensor_does_not_count(make_model):
    model = make_model()
    weights = ResidentWeights(model, loaded=True)
    parts = buckets(model.state_dict().items(), 256)
    weights.begin()
    for bucket in parts[:1] + parts[2:]:
        weights.write(bucket)
    with pytest.raises(WeightSyncError, match="without"):
        weights.commit(1)


def test_unknown_names_and_other_shapes_are_named(make_model):
    weights = ResidentWeights(make_model(), loaded=True)
    with pytest.raises(WeightSyncError, match="did you mean 'lm_head.weight'"):
        sync(weights, [("lm_head.weights", torch.zeros(61, 32))])
    with pytest.raises(WeightSyncError, match=r"\(61, 16\) in training and \(61, 32\) in rollout"):
        sync(weights, [("lm_head.weight", torch.zeros(61, 16))])


def test_released_weights_free_their_memory_and_need_a_sync(make_model):
    source, model = make_model(seed=3), make_model(seed=4)
    weights = ResidentWeights(model, loaded=True)
    weights.release()
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
    with pytest.raises(WeightsNotLoadedError, match="released"):
        weights.require()
    weights.restore()
    with pytest.raises(WeightsNotLoadedError):
        weights.require()
    sync(weights, source.state_dict().items())
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids).logits, source(ids).logits)


def test_a_bucket_is_plain_bytes():
    (bucket,) = buckets([("a", torch.arange(3.0)), ("b", torch.ones(2, dtype=torch.int8))], 1024)
    assert bucket.data.dtype == np.uint8
    assert [(p.name, p.offset, p.count) for p in bucket.pieces] == [("a", 0, 3), ("b", 16, 2)]
