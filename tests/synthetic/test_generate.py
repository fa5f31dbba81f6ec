"""What every shape promises: exact row counts, equal bytes, a best score that means something."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from recmill.errors import ArtifactError, RecmillError, ResourceError
from recmill.synthetic import files, movielens, shop
from recmill.synthetic.generate import SHAPES, TRUTH_FILE, GeneratedLog, generate, read_truth

ROWS = 20_000
LOG_FILES = {
    "criteo": "train.txt",
    "recsys2021": "part-00000.csv",
    "movielens": "ratings.dat",
    "shop": "events.csv",
}
every_shape = pytest.mark.parametrize("shape", list(SHAPES))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, GeneratedLog]]:
    folders = {shape: tmp_path_factory.mktemp(shape) for shape in SHAPES}
    return {shape: (folder, generate(shape, ROWS, 7, folder)) for shape, folder in folders.items()}


@every_shape
def test_best_auc_leaves_room_above_chance_and_below_perfect(made, shape):
    best = made[shape][1].best
    assert 0.75 < best["auc"] < 0.92
    assert 0.1 < best["logloss"] < 0.69


@pytest.mark.parametrize("shape", ["movielens", "shop"])
def test_best_recall_is_far_above_chance_and_grows_with_k(made, shape):
    best = made[shape][1].best
    assert 0.05 < best["recall@10"] < best["recall@50"] < 0.95


@every_shape
def test_report_names_the_files_and_their_size(made, shape):
    folder, report = made[shape]
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in report.files} == names - {TRUTH_FILE}
    assert report.num_bytes == sum(path.stat().st_size for path in report.files)
    assert (report.shape, report.rows) == (shape, ROWS)


@every_shape
def test_rows_are_exactly_as_many_as_asked(made, shape):
    header = 1 if shape == "shop" else 0
    assert num_lines(made[shape][0] / LOG_FILES[shape]) == ROWS + header


@every_shape
@pytest.mark.parametrize("rows", [1, 2, 13, 333])
def test_tiny_logs_are_whole_too(tmp_path, shape, rows):
    generate(shape, rows, 3, tmp_path)
    assert num_lines(tmp_path / LOG_FILES[shape]) == rows + (shape == "shop")


@every_shape
def test_same_arguments_give_the_same_bytes(made, tmp_path, shape):
    generate(shape, ROWS, 7, tmp_path)
    assert contents(tmp_path) == contents(made[shape][0])


@every_shape
def test_another_seed_gives_another_log(made, tmp_path, shape):
    generate(shape, ROWS, 8, tmp_path)
    name = LOG_FILES[shape]
    assert (tmp_path / name).read_bytes() != (made[shape][0] / name).read_bytes()


@every_shape
def test_chunk_size_does_not_change_bytes(made, tmp_path, shape, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 1_777)
    generate(shape, ROWS, 7, tmp_path)
    assert contents(tmp_path) == contents(made[shape][0])


@pytest.mark.parametrize("module", [movielens, shop])
def test_block_size_does_not_change_bytes(made, tmp_path, module, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_CELLS", 5_000)
    generate(module.NAME, ROWS, 7, tmp_path)
    assert contents(tmp_path) == contents(made[module.NAME][0])


@every_shape
def test_truth_is_kept_beside_the_files(made, shape):
    folder, report = made[shape]
    truth = read_truth(folder)
    assert truth is not None
    assert (truth["shape"], truth["rows"], truth["seed"]) == (shape, ROWS, 7)
    assert truth["best"] == report.best
    assert truth["note"] == report.note
    assert truth["parameters"]["seed"] == 7


def test_a_folder_without_truth_has_none(tmp_path):
    assert read_truth(tmp_path) is None


@every_shape
def test_progress_grows_to_the_number_of_rows(tmp_path, shape, monkeypatch):
    monkeypatch.setattr(files, "CHUNK_ROWS", 1_000)
    seen: list[int] = []
    generate(shape, 5_000, 1, tmp_path, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 5_000


def test_the_same_log_may_be_written_again(tmp_path):
    generate("shop", 500, 1, tmp_path)
    before = contents(tmp_path)
    generate("shop", 500, 1, tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("other", [("shop", 500, 2), ("shop", 600, 1), ("criteo", 500, 1)])
def test_a_folder_that_holds_another_log_is_refused(tmp_path, other):
    generate("shop", 500, 1, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match=r"already has a log generated with shape=shop, rows=500, seed=1"):
        generate(*other, tmp_path)
    assert contents(tmp_path) == before


def test_a_file_that_was_not_generated_is_never_overwritten(tmp_path):
    (tmp_path / "train.txt").write_text("the real thing")
    with pytest.raises(ArtifactError, match=r"train.txt already exists"):
        generate("criteo", 10, 1, tmp_path)
    assert contents(tmp_path) == {"train.txt": b"the real thing"}


def test_a_damaged_truth_file_is_refused_and_not_a_traceback(tmp_path):
    (tmp_path / TRUTH_FILE).write_text("{")
    with pytest.raises(ArtifactError, match="delete this one"):
        generate("criteo", 10, 1, tmp_path)
    with pytest.raises(RecmillError, match="not valid JSON"):
        read_truth(tmp_path)


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    def stop(num_rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate("criteo", 1_000, 1, tmp_path, progress=stop)
    assert contents(tmp_path) == {}


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_rows", refuse)
    with pytest.raises(ResourceError, match="is full"):
        generate("criteo", 1_000, 1, tmp_path)
    assert contents(tmp_path) == {}


def test_a_target_that_is_a_file_is_an_error_with_its_name(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ArtifactError, match=r"taken is a file; --into needs a directory"):
        generate("shop", 10, 1, tmp_path / "taken")


@pytest.mark.parametrize("rows", [0, -5, 1.5, True, "10"])
def test_rows_must_be_a_positive_whole_number(tmp_path, rows):
    with pytest.raises(RecmillError, match="rows must be a whole number of at least 1"):
        generate("criteo", rows, 1, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("criteoo", {}), "Shapes: criteo, recsys2021, movielens, shop"),
        (("shop", {"days": [0, 1]}), 'Shape "shop" has no option "days"'),
        (("movielens", {"compress": True}), 'has no option "compress"'),
        (("recsys2021", {"formt": "csv"}), 'Did you mean "format"'),
        (("recsys2021", {"format": "orc"}), 'format must be "csv" or "parquet"'),
        (("recsys2021", {"format": "parquet", "compress": True}), "already compressed"),
        (("criteo", {"days": []}), "days must be different whole numbers"),
        (("criteo", {"days": [1, 1]}), "days must be different whole numbers"),
        (("criteo", {"days": [-1]}), "days must be different whole numbers"),
        (("criteo", {"days": list(range(24))}), "24 days need at least 24 rows, got 10"),
    ],
)
def test_bad_options_are_named(tmp_path, arguments, message):
    shape, options = arguments
    with pytest.raises(RecmillError, match=message):
        generate(shape, 10, 1, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("seed", [-1, 2**63, 0.5])
def test_seed_must_be_a_whole_number_in_range(tmp_path, seed):
    with pytest.raises(RecmillError, match="seed must be"):
        generate("criteo", 10, seed, tmp_path)


@pytest.mark.parametrize("shape", ["criteo", "recsys2021"])
def test_compressed_files_hold_the_same_text(made, tmp_path, shape, monkeypatch):
    generate(shape, ROWS, 7, tmp_path / "a", compress=True)
    packed = (tmp_path / "a" / f"{LOG_FILES[shape]}.gz").read_bytes()
    assert gzip.decompress(packed) == (made[shape][0] / LOG_FILES[shape]).read_bytes()
    monkeypatch.setattr(files, "CHUNK_ROWS", 3_000)
    generate(shape, ROWS, 7, tmp_path / "b", compress=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_the_truth_is_plain_json(made):
    text = (made["criteo"][0] / TRUTH_FILE).read_text(encoding="utf-8")
    assert json.loads(text)["best"]["auc"] == made["criteo"][1].best["auc"]
    assert not np.isnan(json.loads(text)["best"]["logloss"])


def test_a_log_whose_files_did_not_all_get_their_names_is_generated_again(tmp_path):
    """`run` finds the truth, which gets its name first, of a generator that was killed then."""
    from recmill.recipe.load import load_recipe
    from recmill.stages.run.run import _generate

    recipe = load_recipe("quickstart")
    made = _generate(recipe, tmp_path, 100)
    assert _generate(recipe, tmp_path, 100) is None
    made.files[0].unlink()
    assert _generate(recipe, tmp_path, 100).files == made.files
    assert made.files[0].exists()
