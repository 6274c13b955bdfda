"""Every retriever against the conformance suite, with a tiny encoder of its own for the dense ones."""

import json

import numpy as np
import pytest

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError, CorpusError, IndexVersionError, MissingAssetError
from rlinf_plugins.testing.retrievers import CORPUS, RetrieverConformance, write_corpus
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.encoder import Encoder, EncoderConfig
from rlinf_plugins.tools.index import IndexConfig, build_index, manifests, open_index
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.results import Query
from rlinf_plugins.tools.retriever import SearchTool


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random one-layer BERT over whole words: shared words make vectors similar, which is all the suite needs."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder") / "tiny-e5"
    words = sorted({w for _, title, text in CORPUS for w in f"query: passage: {title} {text}".lower().split()})
    words = sorted({w.strip('.,:"') for w in words} | {"query", "passage", ":"})
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(
            vocab_size=len(words) + 2,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            initializer_range=0.5,
            layer_norm_eps=1.0,  # keeps the small vectors of common words small
        )
    )
    with torch.no_grad():  # what is untrained must not swamp the words: only their embeddings are left
        model.embeddings.position_embeddings.weight.zero_()
        for name, weight in model.named_parameters():
            if "output.dense" in name:
                weight.zero_()
        for word in ("[UNK]", "the", "of", "is", "a", "in", "on", "and", "query", "passage", ":"):
            model.embeddings.word_embeddings.weight[core.token_to_id(word)] *= 0.05
    model.save_pretrained(folder)
    return {"model": str(folder)}


class TestBm25(RetrieverConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, corpus_file, tmp_path_factory):
        return opened(corpus_file, tmp_path_factory, "bm25")


class TestTantivy(RetrieverConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, corpus_file, tmp_path_factory):
        pytest.importorskip("tantivy")
        return opened(corpus_file, tmp_path_factory, "tantivy")


class TestDense(RetrieverConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, corpus_file, tmp_path_factory, encoder):
        return opened(corpus_file, tmp_path_factory, "dense", encoder=encoder, rows=3)


class TestFaissFlat(RetrieverConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, corpus_file, tmp_path_factory, encoder):
        pytest.importorskip("faiss")
        return opened(corpus_file, tmp_path_factory, "faiss", encoder=encoder)


class TestFaissHnsw(RetrieverConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, corpus_file, tmp_path_factory, encoder):
        pytest.importorskip("faiss")
        return opened(corpus_file, tmp_path_factory, "faiss", encoder=encoder, kind="hnsw")


class TestQdrant(RetrieverConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def retriever(cls, corpus_file, tmp_path_factory, encoder):
        pytest.importorskip("qdrant_client")
        return opened(corpus_file, tmp_path_factory, "qdrant", encoder=encoder)


def opened(corpus_file, tmp_path_factory, name, **options):
    folder = tmp_path_factory.mktemp("index")
    return open_index(IndexConfig(corpus=str(corpus_file), index=str(folder), retriever=name, options=options))


@pytest.mark.parametrize("bf16", [True, False])
def test_dense_and_faiss_agree(corpus_file, tmp_path_factory, encoder, monkeypatch, bf16):
    pytest.importorskip("faiss")
    monkeypatch.setattr("rlinf_plugins.tools.dense.has_bf16", lambda: bf16)
    dense, exact = (opened(corpus_file, tmp_path_factory, name, encoder=encoder) for name in ("dense", "faiss"))
    queries = [text for _, _, text in CORPUS[:5]]
    for ours, theirs in zip(dense.search(queries, 3), exact.search(queries, 3), strict=True):
        assert ours[0].id == theirs[0].id
        assert ours[0].score == pytest.approx(theirs[0].score, abs=0.01)


@pytest.mark.parametrize(("dtype", "least"), [("float32", 1 - 1e-5), ("bfloat16", 0.999)])
def test_a_text_has_its_vector_whatever_is_encoded_with_it(encoder, dtype, least):
    lone = Encoder(EncoderConfig(**encoder, dtype="float32"))
    texts = [" ".join([*text.split(), title] * (1 + i % 3)) for i, (_, title, text) in enumerate(CORPUS * 6)]
    together = Encoder(EncoderConfig(**encoder, dtype=dtype)).passages(texts)
    alone = np.concatenate([lone.passages([text]) for text in texts])
    assert together.dtype == np.float32
    assert (together * alone).sum(axis=1).min() > least
    assert lone.queries([]).shape == (0, 64)


def test_a_faiss_id_of_minus_one_is_not_the_last_passage(corpus_file, tmp_path_factory, encoder):
    faiss = pytest.importorskip("faiss")
    folder = tmp_path_factory.mktemp("published")
    quantiser = faiss.IndexFlatIP(64)
    index = faiss.IndexIVFFlat(quantiser, 64, 7, faiss.METRIC_INNER_PRODUCT)
    own = opened(corpus_file, tmp_path_factory, "faiss", encoder=encoder)
    vectors = own._index.reconstruct_n(0, len(CORPUS))
    index.train(vectors)
    index.add(vectors)
    faiss.write_index(index, str(folder / "e5_IVF.index"))
    published = opened(
        corpus_file, tmp_path_factory, "faiss", encoder=encoder, file=str(folder / "e5_IVF.index"), nprobe=1
    )
    (passages,) = published.search(["capital of Germany"], 7)
    assert 1 <= len(passages) < 7


def test_an_index_of_another_corpus_is_refused(corpus_file, tmp_path_factory, encoder, tmp_path):
    faiss = pytest.importorskip("faiss")
    for rows, width in ((5, 64), (len(CORPUS), 8)):
        import numpy as np

        index = faiss.IndexFlatIP(width)
        index.add(np.eye(rows, width, dtype=np.float32))
        faiss.write_index(index, str(tmp_path / f"{width}.index"))
        with pytest.raises(IndexVersionError):
            opened(corpus_file, tmp_path_factory, "faiss", encoder=encoder, file=str(tmp_path / f"{width}.index"))
    with pytest.raises(MissingAssetError, match="no faiss index"):
        opened(corpus_file, tmp_path_factory, "faiss", encoder=encoder, file=str(tmp_path / "none.index"))


def test_an_index_is_built_once_and_anew_for_other_data_or_settings(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl")
    config = IndexConfig(corpus=str(path), index=str(tmp_path / "i"))
    first = build_index(config)
    assert build_index(config) == first
    other = build_index(IndexConfig(corpus=str(path), index=str(tmp_path / "i"), options={"b": 0.75}))
    path.touch()  # the same bytes under another time are the same version
    assert build_index(config).version == first.version
    with path.open("a") as file:
        file.write(json.dumps({"id": "n", "contents": "new words"}) + "\n\n")
    third = build_index(config)
    assert len({first.version, other.version, third.version}) == 3
    assert {m.version for m in manifests(tmp_path / "i")} == {first.version, other.version, third.version}
    assert open_index(config).search(["new words"], 1)[0][0].id == "n"
    with pytest.raises(IndexVersionError, match="has changed since"):
        open_index(config, first.version)
    with pytest.raises(IndexVersionError, match="no version"):
        open_index(config, "bm25-x")
    assert not [p for p in (tmp_path / "i").iterdir() if p.name.startswith(".building")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "passage 1"),
        ("[1, 2]", "passage 1"),
        ('{"id": "1"}', "passage 1"),
        ('{"id": "1", "contents": 5}', "not text"),
    ],
)
def test_a_bad_line_is_named_and_leaves_nothing_behind(tmp_path, line, says):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "0", "contents": "fine words"}\n' + line + "\n")
    with pytest.raises(CorpusError, match=says):
        build_index(IndexConfig(corpus=str(path)))
    assert manifests(tmp_path / "c.jsonl.index") == []


def test_no_or_empty_corpus(tmp_path):
    with pytest.raises(MissingAssetError, match="no corpus"):
        build_index(IndexConfig(corpus=str(tmp_path / "none.jsonl")))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(CorpusError, match="empty"):
        build_index(IndexConfig(corpus=str(tmp_path / "empty.jsonl")))
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(CorpusError, match="no passage"):
        Corpus(tmp_path / "blank.jsonl")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"retriever": "bm52"}, "did you mean 'bm25'"),
        ({"options": {"k1": -1.0}}, "k1 >= 0"),
        ({"retriever": "dense", "options": {"encoder": {"model": "/models/mystery"}}}, "cannot tell the family"),
        ({"retriever": "dense", "options": {"rows": 0}}, "rows must be at least 1"),
    ],
)
def test_bad_index_settings_are_named(values, says):
    with pytest.raises(ConfigError, match=says):
        from_mapping(IndexConfig, {"corpus": "c.jsonl", **values}, "index")


def test_a_dense_index_without_a_model_says_so(corpus_file, tmp_path):
    with pytest.raises(MissingAssetError, match=r"encoder\.model"):
        build_index(IndexConfig(corpus=str(corpus_file), index=str(tmp_path), retriever="dense"))


async def test_the_tool_searches_off_the_event_loop(corpus_file, tmp_path_factory):
    import threading

    retriever = opened(corpus_file, tmp_path_factory, "bm25")
    seen = []
    search = retriever.search
    retriever.search = lambda queries, topk: seen.append(threading.current_thread()) or search(queries, topk)
    pool = ToolPool(SearchTool(retriever))
    outcomes = await pool.call_many([Query("capital of Germany", 1), Query("river", 2)])
    assert [o.value[0].id for o in outcomes] == ["0", "2"]
    assert seen[0] is not threading.main_thread()
    await pool.close()


@pytest.mark.slow
def test_bm25_finds_the_answers_of_real_questions(hotpot, tmp_path):
    retriever = open_index(IndexConfig(corpus=str(hotpot / "corpus.jsonl"), index=str(tmp_path)))
    rows = [json.loads(line) for line in (hotpot / "train_400.jsonl").open()]
    found = retriever.search([row["question"] for row in rows], 3)
    hits = sum(
        any(row["answer"].lower() in p.contents.lower() for p in passages)
        for row, passages in zip(rows, found, strict=True)
    )
    assert hits / len(rows) > 0.48
