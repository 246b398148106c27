"""Every corpus on a small tree of its own layout; downloads against a server that breaks off."""

import http.server
import io
import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

import sphere
from imputer import audio
from imputer.configs import FrontEnd
from imputer.corpora import CORPORA, Dropped, Found, Options
from imputer.corpora.cmudict import PHONEMES
from imputer.corpora.digits import BACKGROUNDS, WORDS, Room, join, split_speakers
from imputer.corpora.download import fetch, fetch_archive, unpack
from imputer.corpora.librispeech import ARCHIVES, SUBSETS
from imputer.corpora.validation import checked, write_manifests
from imputer.corpora.wsj import normalise_transcript
from imputer.data.manifest import Manifest, Utterance
from imputer.data.text import lower, plain
from imputer.errors import ImputerError, UsageError
from imputer.frontends.letters import LETTERS, Letters, read_letters
from trainings import imputer

RATE = 16000
DATA = Path(__file__).parents[2] / "shared" / "data"


def tone(seconds: float = 2.0, hertz: float = 440.0) -> np.ndarray:
    time = np.arange(round(seconds * RATE)) / RATE
    return (0.1 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def written(path: Path, seconds: float = 2.0, hertz: float = 440.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(seconds, hertz), RATE)
    return path


def found(name: str, source: Path, **options: object) -> tuple[list[Found], list[Dropped]]:
    items = list(CORPORA[name](source, Options(**options)))
    return [i for i in items if isinstance(i, Found)], [i for i in items if isinstance(i, Dropped)]


def rows(items: list[Found]) -> list[tuple[str, str, str, str]]:
    return [(i.utterance.id, i.utterance.text, i.utterance.speaker, i.split) for i in items]


# Text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World!", "hello world"),
        ("It’s a well-known fact — isn't it?", "it's a well known fact isn't it"),
        ("'Tis the dogs' \"bone\"", "'tis the dogs' bone"),
        ("'quoted' words ' alone", "quoted words alone"),
        ("Crème brûlée,  naïve\n\tcafé", "crème brûlée naïve café"),
        ("snake_case & 50% of 3.5", "snake case 50 of 35"),
        ("ＦＵＬＬ width", "full width"),
        ("...", ""),
    ],
)
def test_plain_text(text: str, expected: str) -> None:
    assert plain(text) == expected
    assert plain(expected) == expected


def test_lower_text_keeps_marks() -> None:
    assert lower("U. S.  DON'T-care") == "u. s. don't-care"


def test_an_unknown_text_form_is_the_callers_mistake(tmp_path: Path) -> None:
    written(tmp_path / "a.wav").with_suffix(".txt").write_text("a")
    with pytest.raises(UsageError, match="shouted"):
        found("folder", tmp_path, text="shouted")


# folder


def test_audio_beside_texts(tmp_path: Path) -> None:
    written(tmp_path / "anna" / "one.wav").with_suffix(".txt").write_text("\ufeffHello, Anna!\n")
    written(tmp_path / "two.FLAC").with_suffix(".TXT").write_text("Two.")
    written(tmp_path / "silent.ogg")
    written(tmp_path / "latin.wav").with_suffix(".txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "notes.txt").write_text("no audio")
    good, dropped = found("folder", tmp_path)
    assert rows(good) == [("two", "two", "", ""), ("anna-one", "hello anna", "anna", "")]
    assert {(d.reason, Path(d.item).name) for d in dropped} == {
        ("no text file of the same name", "silent.ogg"),
        ("text file is not UTF-8", "latin.txt"),
        ("no audio file of the same name", "notes.txt"),
    }


def test_a_table_finds_its_audio_by_id(tmp_path: Path) -> None:
    for name in ("u-1", "u-2"):
        written(tmp_path / "audio" / f"{name}.ogg")
    (tmp_path / "manifest.tsv").write_text(
        "utt\tspeaker\tchapter\tseconds\ttext\nu-1\t7\t1\t2.0\tSAY \"IT\nu-2\t8\t1\t2.0\tDON'T\nu-3\t8\t1\t2.0\tGONE\n"
    )
    good, dropped = found("folder", tmp_path)
    assert rows(good) == [("u-1", "say it", "7", ""), ("u-2", "don't", "8", "")]
    assert [i.utterance.duration for i in good] == [0.0, 0.0]
    assert dropped == [Dropped("audio file not found", f"{tmp_path / 'manifest.tsv'}, line 4: u-3")]


def test_a_table_of_slices(tmp_path: Path) -> None:
    written(tmp_path / "audio" / "a.ogg", 10.0)
    (tmp_path / "segments.tsv").write_text(
        "utt\tspeaker\tfile\tstart\tend\ttext\n"
        "1\ts\taudio/a.ogg\t0.0\t1.5\tONE\n"
        "2\ts\taudio/a.ogg\t1.5\t3.25\tTWO\n"
        "3\ts\taudio/a.ogg\t5\t4\tTHREE\n"
        "4\ts\taudio/a.ogg\tx\t4\tFOUR\n"
    )
    good, dropped = found("folder", tmp_path)
    assert [(i.utterance.offset, i.utterance.duration) for i in good] == [(0.0, 1.5), (1.5, 1.75)]
    assert [d.reason for d in dropped] == ["start and end are not in order", "start is not a number"]


def test_a_csv_with_quotes_and_splits(tmp_path: Path) -> None:
    written(tmp_path / "clips" / "x.wav")
    written(tmp_path / "clips" / "y.wav")
    table = tmp_path / "all.csv"
    table.write_text('Path,Sentence,Split\nx.wav,"Yes, ""sir""",train\nclips/y.wav,No,test\n')
    for source in (tmp_path, table):
        good, dropped = found("folder", source)
        assert rows(good) == [("clips-x", "yes sir", "", "train"), ("clips-y", "no", "", "test")]
        assert not dropped


def test_a_table_of_files_with_one_name_in_two_folders(tmp_path: Path) -> None:
    written(tmp_path / "anna" / "one.wav")
    written(tmp_path / "bob" / "one.wav")
    (tmp_path / "all.csv").write_text("path,text\nanna/one.wav,yes\nbob/one.wav,no\n")
    good, dropped = found("folder", tmp_path)
    assert rows(good) == [("anna-one", "yes", "", ""), ("bob-one", "no", "", "")] and not dropped


def test_folders_that_cannot_be_read_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither audio files nor"):
        found("folder", tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        found("folder", tmp_path / "none")
    (tmp_path / "a.csv").write_text("file,words\na,b\n")
    (tmp_path / "b.tsv").write_text("x\n")
    with pytest.raises(UsageError, match=r"several tables \(a.csv, b.tsv\)"):
        found("folder", tmp_path)
    with pytest.raises(UsageError, match=r"b\.tsv needs a header with a text column"):
        found("folder", tmp_path / "b.tsv")


# kaldi


def test_a_kaldi_folder_with_segments(tmp_path: Path) -> None:
    path = written(tmp_path / "wavs" / "rec1.wav", 10.0)
    (tmp_path / "wav.scp").write_text(f"rec1 {path}\nrec2 sph2pipe -f wav x.sph |\nrec3 wavs/rec1.wav\n")
    (tmp_path / "text").write_text(
        "u1 HELLO THERE\nu2\tTAB BED\nu3 PIPED\nu4 NO SEGMENT\nu5 BAD\nu6 TO THE END\nu7 LOST\n"
    )
    (tmp_path / "segments").write_text(
        "u1 rec1 0.5 1.5\nu2 rec3 2 3\nu3 rec2 0 1\nu5 rec1 3 2\nu6 rec1 8.5 -1\nu7 rec9 0 1\n"
    )
    (tmp_path / "utt2spk").write_text("u1 s1\nu2 s2\n")
    good, dropped = found("kaldi", tmp_path)
    assert rows(good) == [
        ("u1", "hello there", "s1", ""),
        ("u2", "tab bed", "s2", ""),
        ("u6", "to the end", "", ""),
    ]
    assert [(i.utterance.offset, i.utterance.duration) for i in good] == [(0.5, 1.0), (2.0, 1.0), (8.5, 0.0)]
    assert good[1].utterance.audio_filepath == str(path)
    assert [d.reason for d in dropped] == [
        "wav.scp holds a command, not a path",
        "not in segments",
        "start and end are not in order",
        "not in wav.scp",
    ]
    measured = [item.utterance.duration for item in checked(good) if isinstance(item, Found)]
    assert measured == [1.0, 1.0, 1.5]


def test_a_kaldi_folder_of_whole_recordings(tmp_path: Path) -> None:
    (tmp_path / "wav.scp").write_text(f"u1 {written(tmp_path / 'a.wav')}\n")
    (tmp_path / "text").write_text("u1 YES\n")
    assert rows(found("kaldi", tmp_path)[0]) == [("u1", "yes", "", "")]
    (tmp_path / "text").unlink()
    with pytest.raises(UsageError, match="has no text"):
        found("kaldi", tmp_path)


# librispeech


def libri(root: Path, part: str = "dev-clean") -> Path:
    chapter = root / "LibriSpeech" / part / "84" / "121"
    for i in range(3):
        written(chapter / f"84-121-{i:04d}.flac", 1.0 + i)
    (chapter / "84-121.trans.txt").write_text(
        "84-121-0000 GO DO YOU HEAR\n84-121-0001 DON'T\n84-121-0002 BUT IN LESS\n"
    )
    (root / "LibriSpeech" / "README.TXT").write_text("readme")
    return root


def test_librispeech_from_any_level(tmp_path: Path) -> None:
    libri(tmp_path, "dev-clean")
    expected = [
        ("84-121-0000", "go do you hear", "84"),
        ("84-121-0001", "don't", "84"),
        ("84-121-0002", "but in less", "84"),
    ]
    for source in (tmp_path, tmp_path / "LibriSpeech", tmp_path / "LibriSpeech" / "dev-clean"):
        good, dropped = found("librispeech", source)
        assert rows(good) == [(*row, "dev-clean") for row in expected]
        assert not dropped
    libri(tmp_path, "train-clean-100")
    good, _ = found("librispeech", tmp_path)
    assert [i.split for i in good] == ["dev-clean"] * 3 + ["train-clean-100"] * 3
    good, _ = found("librispeech", tmp_path, splits=("train-clean-100",))
    assert len(good) == 3


def test_librispeech_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no LibriSpeech part"):
        found("librispeech", tmp_path)
    libri(tmp_path)
    with pytest.raises(UsageError, match=r"no part 'test-clean' \(there: dev-clean\)"):
        found("librispeech", tmp_path, splits=("test-clean",))
    with pytest.raises(UsageError, match="'dev-dirty'"):
        found("librispeech", tmp_path, splits=("dev-dirty",), download=True)
    (tmp_path / "LibriSpeech/dev-clean/84/121/84-121-0001.flac").unlink()
    items = list(checked(CORPORA["librispeech"](tmp_path, Options())))
    assert [d.reason for d in items if isinstance(d, Dropped)] == ["unreadable audio"]


def test_the_sets_of_the_experiments_come_from_the_official_folders(tmp_path: Path) -> None:
    """By the command, from a tree with every speaker of dev-clean and some of test-clean beside those of the set."""
    dev = {*SUBSETS["dev-clean-train"][1], *SUBSETS["dev-clean-held-out"][1]}
    test = set(SUBSETS["test-clean-a"][1])
    assert (len(dev), len(test)) == (40, 20) and not dev & test
    for part, speakers in (("dev-clean", dev), ("test-clean", test | {"61", "908"})):
        for speaker in speakers:
            chapter = tmp_path / "LibriSpeech" / part / speaker / "7"
            written(chapter / f"{speaker}-7-0000.flac", 1.0)
            (chapter / f"{speaker}-7.trans.txt").write_text(f"{speaker}-7-0000 GO\n")
    imputer("prepare", "librispeech", str(tmp_path), "-o", str(tmp_path / "libri.jsonl"), "--split", *SUBSETS)
    for split, (_, speakers) in SUBSETS.items():
        ids = [u.id for u in Manifest(tmp_path / f"libri-{split}.jsonl")]
        assert sorted(ids) == sorted(f"{speaker}-7-0000" for speaker in speakers)
    shutil.rmtree(tmp_path / "LibriSpeech" / "test-clean" / "8463")
    with pytest.raises(UsageError, match="lacks speakers of test-clean-a: 8463"):
        found("librispeech", tmp_path, splits=("test-clean-a",))


class Server:
    """Serves bytes with ranges; breaks the first connections off after a number of bytes."""

    def __init__(self, content: bytes, *, breaks: list[int], ranges: bool = True) -> None:
        self.asked: list[str | None] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range")
                server.asked.append(asked)
                if not self.path.endswith("/dev-clean.tar.gz"):
                    self.send_error(404)
                    return
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and ranges else 0
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                end = start + breaks.pop(0) if breaks else len(content)
                self.wfile.write(content[start:end])

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/resources"

    def __enter__(self) -> "Server":
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    libri(tmp_path / "made")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(tmp_path / "made" / "LibriSpeech", "LibriSpeech")
    return buffer.getvalue()


def md5(content: bytes) -> str:
    import hashlib

    return hashlib.md5(content).hexdigest()


def test_a_broken_download_goes_on_where_it_broke_off(
    tmp_path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setitem(ARCHIVES, "dev-clean", md5(archive))
    third = len(archive) // 3
    with Server(archive, breaks=[third, third]) as server:
        good, dropped = found(
            "librispeech", tmp_path / "new", splits=("dev-clean",), download=True, mirror=server.address
        )
        assert server.asked == [None, f"bytes={third}-", f"bytes={2 * third}-"]
        assert len(good) == 3 and not dropped
        # There now: nothing is fetched again.
        found("librispeech", tmp_path / "new", splits=("dev-clean",), download=True, mirror=server.address)
        assert len(server.asked) == 3
    assert sorted(path.name for path in (tmp_path / "new").rglob("*") if path.is_file()) == [
        "84-121-0000.flac",
        "84-121-0001.flac",
        "84-121-0002.flac",
        "84-121.trans.txt",
        "README.TXT",
    ]


def test_a_later_run_continues_and_a_server_without_ranges_starts_over(
    tmp_path: Path, archive: bytes
) -> None:
    path = tmp_path / "dev-clean.tar.gz"
    for ranges in (True, False):
        (tmp_path / "dev-clean.tar.gz.part").write_bytes(archive[:1000])
        with Server(archive, breaks=[], ranges=ranges) as server:
            fetch(f"{server.address}/dev-clean.tar.gz", path, md5(archive), wait=0)
            assert server.asked == ["bytes=1000-"]
        assert path.read_bytes() == archive
    (tmp_path / "dev-clean.tar.gz.part").write_bytes(archive)
    with Server(archive, breaks=[]) as server:
        fetch(f"{server.address}/dev-clean.tar.gz", path, md5(archive), wait=0)


def test_downloads_that_fail_say_so_and_leave_no_wrong_file(tmp_path: Path, archive: bytes) -> None:
    path = tmp_path / "dev-clean.tar.gz"
    with Server(archive, breaks=[]) as server:
        with pytest.raises(ImputerError, match="MD5 sum is"):
            fetch(f"{server.address}/dev-clean.tar.gz", path, "0" * 32, wait=0)
        with pytest.raises(ImputerError, match="404"):
            fetch(f"{server.address}/dev-dirty.tar.gz", path, "0" * 32, wait=0)
        gone = server.address
    with pytest.raises(ImputerError, match=r"cannot be fetched.*run the same command again"):
        fetch(f"{gone}/dev-clean.tar.gz", path, "0" * 32, wait=0)
    with (
        Server(archive, breaks=[100, 0, 0, 0, 0, 0]) as server,
        pytest.raises(ImputerError, match="cannot be fetched"),
    ):
        fetch(f"{server.address}/dev-clean.tar.gz", path, md5(archive), wait=0)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["dev-clean.tar.gz.part"]


def packed(member: tarfile.TarInfo) -> bytes:
    """An archive of one member; a file has four bytes."""
    member.size = 4 if member.isfile() else 0
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(member, io.BytesIO(b"evil"))
    return buffer.getvalue()


def test_an_archive_is_unpacked_by_a_python_without_extraction_filters(
    tmp_path: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extract(tar, member, path="", set_attrs=True, *, numeric_owner=False):  # type: ignore[no-untyped-def]
        raise AssertionError("without a filter, this follows links and writes anywhere")

    monkeypatch.setattr(tarfile.TarFile, "extract", extract)  # the signature of Python 3.11.0 to 3.11.3
    (tmp_path / "libri.tar").write_bytes(archive)
    unpack(tmp_path / "libri.tar", tmp_path / "to", "LibriSpeech/dev-clean")
    made, unpacked = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "made", tmp_path / "to")
    )
    assert unpacked == made and len(made) == 5


def test_a_damaged_or_malicious_archive_leaves_nothing(tmp_path: Path, archive: bytes) -> None:
    cut = archive[: len(archive) // 2]
    members = [tarfile.TarInfo(name) for name in ("../../outside.txt", "a/../../../outside.txt")]
    members += [tarfile.TarInfo(str(tmp_path / "outside.txt")), tarfile.TarInfo("a"), tarfile.TarInfo("a")]
    members[-2].type, members[-1].type = tarfile.SYMTYPE, tarfile.LNKTYPE
    members[-2].linkname = members[-1].linkname = str(tmp_path)
    fifo = tarfile.TarInfo("fifo")
    fifo.type = tarfile.FIFOTYPE
    for content in (cut, *map(packed, [*members, fifo]), b"no archive"):
        folder = tmp_path / "to"
        with Server(content, breaks=[]) as server, pytest.raises(ImputerError, match="cannot be unpacked"):
            fetch_archive(
                f"{server.address}/dev-clean.tar.gz", md5(content), folder, "LibriSpeech/dev-clean", wait=0
            )
        assert [entry.name for entry in folder.iterdir()] == ["dev-clean.tar.gz"]
        (folder / "dev-clean.tar.gz").unlink()
    assert not list(tmp_path.rglob("outside.txt"))


# wsj


def wsj_tree(root: Path, *, disks: bool) -> Path:
    """Two training speakers, one each for dev93 and eval92, in real shorten-compressed SPHERE."""

    def place(disk: str, path: str) -> Path:
        full = root / disk / path if disks else root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        return full

    sphere.write(place("11-1.1", "wsj0/si_tr_s/011/011c0201.wv1"), tone(1.0))
    sphere.write(place("11-1.1", "wsj0/si_tr_s/011/011c0202.wv1"), tone(1.2), compressed=False)
    sphere.write(place("11-2.1", "wsj0/si_tr_s/401/401c0201.wv1"), tone(1.0))
    sphere.write(place("13-1.1", "wsj1/si_tr_s/4aa/4aac0201.wv1"), tone(1.4))
    sphere.write(place("13-16.1", "wsj1/si_dt_20/4k0/4k0c0301.wv1"), tone(1.1))
    sphere.write(place("11-14.1", "wsj0/si_et_20/440/440c0401.wv1"), tone(1.3))
    indices = {
        ("11-13.1", "wsj0/doc/indices/train/tr_s_wv1.ndx"): (
            ";; a comment\n11_1_1:wsj0/si_tr_s/011/011c0201.wv1\n11_1_1: wsj0/si_tr_s/011/011c0202.wv1\n"
            "11_1_1:wsj0/si_tr_s/011/011c0203.wv1\n11_2_1:wsj0/si_tr_s/401/401c0201.wv1\n"
        ),
        ("13-34.1", "wsj1/doc/indices/si_tr_s.ndx"): "13_1_1:wsj1/si_tr_s/4aa/4aac0201.wv1\n",
        ("13-34.1", "wsj1/doc/indices/h1_p0.ndx"): "13_16_1:wsj1/si_dt_20/4k0/4k0c0301.wv1\n",
        ("11-13.1", "wsj0/doc/indices/test/nvp/si_et_20.ndx"): "11_14_1:wsj0/si_et_20/440/440c0401\n",
    }
    for (disk, path), content in indices.items():
        place(disk, path).write_text(content)
    dots = {
        "wsj0/transcrp/dots/si_tr_s/011/011c0200.dot": (
            "THE SALE OF THE HOTELS (011c0201)\n[<door_slam] It\\'s <up> to [loud_breath] you . ~ (011c0202)\n"
            "LOST (011c0203)\n"
        ),
        "wsj0/transcrp/dots/si_tr_s/401/401c0200.dot": "LEFT OUT (401c0201)\n",
        "wsj1/trans/wsj1/si_tr_s/4aa/4aac0200.dot": "TEN \\%PERCENT (4AAC0201)\n",
        "wsj1/trans/wsj1/si_dt_20/4k0/4k0c0300.dot": "FIVE .POINT TWO --DASH (4k0c0301)\n",
        "wsj0/transcrp/dots/si_et_20/440/440c0400.dot": "U. S. AND MULTI-MILLION (440c0401)\n",
    }
    for path, content in dots.items():
        place("11-4.1" if path.startswith("wsj0") else "13-34.1", path).write_text(content)
    return root


EXPECTED_WSJ = [
    ("011c0201", "the sale of the hotels", "011", "si284"),
    ("011c0202", "it's up to you", "011", "si284"),
    ("4aac0201", "ten percent", "4aa", "si284"),
    ("4k0c0301", "five point two -dash", "4k0", "dev93"),
    ("440c0401", "u. s. and multi-million", "440", "eval92"),
]


@pytest.mark.parametrize("disks", [True, False], ids=["disks", "merged"])
def test_wsj_with_shorten_compressed_audio(tmp_path: Path, disks: bool) -> None:
    source = wsj_tree(tmp_path / "wsj", disks=disks)
    good, dropped = found("wsj", source, audio_folder=tmp_path / "flac", workers=2 if disks else 1)
    assert rows(good) == EXPECTED_WSJ
    assert dropped == [Dropped("listed in the index, but missing", "wsj0/si_tr_s/011/011c0203.wv1")]
    for item, seconds in zip(good, (1.0, 1.2, 1.4, 1.1, 1.3), strict=True):
        samples = audio.read(item.utterance.audio_filepath)
        np.testing.assert_allclose(samples, tone(seconds), atol=1 / 16384)
    good, _ = found("wsj", source, audio_folder=tmp_path / "flac", splits=("si84",))
    assert [item.utterance.id for item in good] == ["011c0201", "011c0202"]


def test_wsj_in_capitals_converted_and_without_indices(tmp_path: Path) -> None:
    source = wsj_tree(tmp_path / "wsj", disks=False)
    for path in list(source.rglob("*.ndx")):
        path.unlink()
    (source / "wsj0").rename(source / "WSJ0")
    wav = source / "WSJ0/si_et_20/440/440c0401.wv1"
    soundfile.write(wav.with_suffix(".wav"), tone(1.3), RATE)
    wav.unlink()
    good, dropped = found("wsj", source, audio_folder=tmp_path / "flac")
    assert rows(good) == EXPECTED_WSJ and not dropped
    good, _ = found("wsj", source / "WSJ0", audio_folder=tmp_path / "flac", splits=("eval92",))
    assert rows(good) == EXPECTED_WSJ[-1:]


def test_wsj_names_what_is_wrong(tmp_path: Path) -> None:
    source = wsj_tree(tmp_path / "wsj", disks=True)
    with pytest.raises(UsageError, match="'si999'"):
        found("wsj", source, splits=("si999",))
    with pytest.raises(UsageError, match="no audio of eval93 was found"):
        found("wsj", source, splits=("eval93",))
    path = source / "11-14.1/wsj0/si_et_20/440/440c0401.wv1"
    path.write_bytes(path.read_bytes()[:3000])
    (source / "13-34.1/wsj1/trans/wsj1/si_dt_20/4k0/4k0c0300.dot").unlink()
    _, dropped = found("wsj", source, audio_folder=tmp_path / "flac", splits=("dev93", "eval92"))
    assert dropped[0] == Dropped("no transcript", "wsj1/si_dt_20/4k0/4k0c0301.wv1")
    assert dropped[1].reason == "unreadable audio" and str(path) in dropped[1].item


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[<door_slam] a [door_slam>] b [phone_ring/] c [/phone_ring] d", "A B C D"),
        ("uh [loud_breath] x[cough]", "UH"),
        ('<and> \\"DOUBLE\\-QUOTE ~ . end.', 'AND "DOUBLE-QUOTE END.'),
        ("*mispronounced* pro- ,COMMA", "*MISPRONOUNCED* PRO- ,COMMA"),
    ],
)
def test_transcripts_are_normalised_as_kaldi_does(text: str, expected: str) -> None:
    assert normalise_transcript(text) == expected


def test_shorten_is_decoded_exactly(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    samples = np.concatenate(
        [
            np.zeros(600),
            np.cumsum(random.integers(-300, 301, 1500)).clip(-32768, 32767),
            random.integers(-32768, 32768, 500),
        ]
    ).astype(np.int64)
    content = sphere.sphere(samples)
    assert b"shorten" in content and b"ajkg" in content
    np.testing.assert_array_equal(audio.read(io.BytesIO(content)) * 32768, samples)
    path = tmp_path / "a.wv1"
    path.write_bytes(content)
    np.testing.assert_array_equal(audio.read(path, offset=0.05, duration=0.05) * 32768, samples[800:1600])
    path.write_bytes(sphere.sphere(samples, compressed=False)[:-100])
    with pytest.raises(ImputerError, match=r"a\.wv1: the audio is cut off"):
        audio.read(path)


# digits: each digit is a tone of its own, so that the joined digits can be identified


def digit_tone(digit: int, seconds: float = 0.4) -> np.ndarray:
    random = np.random.default_rng(digit)
    silence = round(0.15 * RATE)
    sound = 0.05 * np.sin(2 * np.pi * (400 + 300 * digit) * np.arange(round(seconds * RATE)) / RATE)
    sound *= np.hanning(len(sound)) ** 0.3
    return np.pad(sound, silence) + 1e-4 * random.standard_normal(len(sound) + 2 * silence)


def digit_files(root: Path, speakers: int = 3) -> Path:
    for speaker in range(speakers):
        for digit in range(10):
            for take in range(2):
                path = root / f"{speaker:02d}" / f"{digit}_{speaker:02d}_{take}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                soundfile.write(path, digit_tone(digit), RATE)
    return root


def digit_segments(root: Path, speakers: int = 3) -> Path:
    (root / "audio").mkdir(parents=True)
    lines = ["utt\tspeaker\tfile\tstart\tend\ttext"]
    for speaker in range(speakers):
        pieces, at = [], 0.0
        for digit in range(10):
            piece = digit_tone(digit)
            end = at + len(piece) / RATE
            word = WORDS[digit].upper()
            lines.append(
                f"{speaker:02d}-{digit}\t{speaker:02d}\taudio/{speaker:02d}.ogg\t{at:.4f}\t{end:.4f}\t{word}"
            )
            pieces.append(piece)
            at = end
        soundfile.write(root / "audio" / f"{speaker:02d}.ogg", np.concatenate(pieces), RATE)
    (root / "segments.tsv").write_text("\n".join(lines) + "\n")
    return root


def heard(samples: np.ndarray) -> list[str]:
    """The digits of a string by their pitch."""
    frames = samples[: len(samples) // 320 * 320].reshape(-1, 320) * np.hanning(320)
    spectra = np.abs(np.fft.rfft(frames, 1600))  # 10 Hz bins
    loud = spectra.max(1) > 0.3 * np.percentile(spectra.max(1), 95)
    said: list[str] = []
    run: list[int] = []
    for spectrum, is_loud in zip([*spectra, spectra[0]], [*loud, False], strict=True):
        digit = round((spectrum.argmax() * 10 - 400) / 300) if is_loud else None
        if run and digit != run[0]:
            # Two of the same digit without a pause are told apart by their length.
            said += [WORDS[run[0]]] * max(1, round(len(run) / 19))
            run = []
        if digit is not None:
            run.append(digit)
    return said


@pytest.mark.parametrize("layout", [digit_files, digit_segments])
def test_digit_strings_say_their_text(tmp_path: Path, layout: Callable[[Path], Path]) -> None:
    source = layout(tmp_path / "digits")
    good, dropped = found("digits", source, audio_folder=tmp_path / "out", strings=12, speakers_held_out=1)
    assert len(good) == 36 and not dropped
    for item in good:
        samples = audio.read(item.utterance.audio_filepath)
        assert heard(samples) == item.utterance.text.split()
        assert item.utterance.duration == len(samples) / RATE
        assert item.utterance.id.startswith(item.utterance.speaker)
    assert {len(item.utterance.text.split()) for item in good} >= {1, 5, 10}
    by_split = {
        split: {i.utterance.speaker for i in good if i.split == split} for split in ("train", "valid", "test")
    }
    assert [len(speakers) for speakers in by_split.values()] == [1, 1, 1]
    assert len(set.union(*by_split.values())) == 3


def test_a_seed_reproduces_the_strings(tmp_path: Path) -> None:
    source = digit_files(tmp_path / "digits")
    runs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        good, _ = found(
            "digits", source, audio_folder=tmp_path / name, strings=3, speakers_held_out=1, seed=seed
        )
        runs.append([(rows([i]), audio.read(i.utterance.audio_filepath).tolist()) for i in good])
    assert runs[0] == runs[1] != runs[2]


def sharpness(samples: np.ndarray) -> float:
    """How far the sharpest corner stands out: a click is one."""
    corners = np.abs(np.diff(samples, 3))
    return float(corners.max() / np.sqrt(np.square(corners).mean()))


def test_joints_do_not_click_and_pauses_are_not_dead() -> None:
    random = np.random.default_rng(0)
    # Hard cases: sounds that are cut off while loud, in a room with audible noise.
    loud = [tone(0.4, 300 + 100 * i)[: 6000 + 37 * i] for i in range(10)]
    rooms = [np.concatenate([one, np.zeros(3200)]) for one in loud]
    noisy = [one + 0.001 * random.standard_normal(len(one)) for one in rooms]
    room = Room([one.astype(np.float32) for one in noisy], random)
    assert room.floor_db == pytest.approx(-60, abs=1.5)
    pieces = [one[:-3200].astype(np.float32) for one in noisy]
    joined = [join(pieces, room, random, "own room") for _ in range(5)]
    assert sharpness(np.concatenate(pieces)) > 25
    for samples in joined:
        assert np.abs(samples).max() < 1
        assert sharpness(samples) < 8
        energies = 10 * np.log10(np.square(samples[: len(samples) // 400 * 400].reshape(-1, 400)).mean(1))
        # The quietest 25 ms lie as far below the speech as the room did.
        assert np.percentile(energies, 75) - energies.min() < room.speech_db - room.floor_db + 6


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_backgrounds_lie_between_the_digits(background: str) -> None:
    random = np.random.default_rng(1)
    pieces = [np.concatenate([tone(0.3, 300), np.zeros(3200)]).astype(np.float32) for _ in range(4)]
    noisy = [piece + 0.0005 * random.standard_normal(len(piece)).astype(np.float32) for piece in pieces]
    room = Room(noisy, random)
    samples = join(noisy, room, random, background)
    assert np.isfinite(samples).all() and np.abs(samples).max() < 1
    exact_zeros = np.count_nonzero(samples == 0) / len(samples)
    assert (exact_zeros > 0.05) == (background == "digital silence")


def test_strings_differ_in_their_joints() -> None:
    random = np.random.default_rng(2)
    piece = np.concatenate([np.zeros(1600), tone(0.3, 300), np.zeros(1600)]).astype(np.float32)
    noisy = [piece + 0.001 * random.standard_normal(len(piece)).astype(np.float32) for _ in range(4)]
    room = Room(noisy, random)
    made = [join(noisy, room, random) for _ in range(60)]
    dead = [np.count_nonzero(one == 0) > 0.05 * len(one) for one in made]
    assert 5 < sum(dead) < 30
    assert max(len(one) for one in made) > 3 * audio.SAMPLE_RATE  # a long pause
    assert all(np.isfinite(one).all() for one in made)


def test_speakers_are_held_out_by_name_or_number() -> None:
    speakers = [f"{i}" for i in range(10)]
    drawn = split_speakers(speakers, Options(speakers_held_out=2))
    assert sorted(drawn.values()) == ["test"] * 2 + ["train"] * 6 + ["valid"] * 2
    assert drawn == split_speakers(speakers, Options(speakers_held_out=2))
    named = split_speakers(speakers, Options(test_speakers=("3", "4")))
    assert [s for s in speakers if named[s] == "test"] == ["3", "4"]
    assert list(named.values()).count("train") == 8, "only those that are named are held out"
    for everyone in (tuple(speakers), ("all",)):
        assert set(split_speakers(speakers, Options(test_speakers=everyone)).values()) == {"test"}
    tested = split_speakers(speakers, Options(speakers_held_out=10, splits=("test",)))
    assert set(tested.values()) == {"test"}
    for options, said in (
        (Options(test_speakers=("x",)), "no such speaker: x"),
        (Options(test_speakers=("1",), valid_speakers=("1",)), "both"),
        (Options(speakers_held_out=5), "leaves none"),
    ):
        with pytest.raises(UsageError, match=said):
            split_speakers(speakers, options)


def test_digit_recordings_that_are_not_are_dropped(tmp_path: Path) -> None:
    source = digit_files(tmp_path / "digits")
    (source / "00" / "3_00_0.wav").write_bytes(b"not audio")
    good, dropped = found("digits", source, audio_folder=tmp_path / "o", strings=2, speakers_held_out=1)
    assert len(good) == 6 and [d.reason for d in dropped] == ["unreadable audio"]
    with pytest.raises(UsageError, match=r"no segments\.tsv and no files"):
        found("digits", written(tmp_path / "other" / "a.wav").parent)


# lhotse


def test_lhotse_cuts(tmp_path: Path) -> None:
    pytest.importorskip("lhotse")
    from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

    recording = Recording.from_file(written(tmp_path / "rec.wav", 10.0))

    def supervision(name: str, start: float, duration: float, text: str) -> SupervisionSegment:
        return SupervisionSegment(name, "rec", start, duration, channel=0, text=text, speaker="s")

    cuts = CutSet.from_cuts(
        [
            MonoCut("one", 1.0, 2.0, 0, [supervision("s1", 0.0, 2.0, "Hello, there")], recording=recording),
            MonoCut(
                "two",
                3.0,
                6.0,
                0,
                [supervision("s2", 0.5, 1.0, "First"), supervision("s3", 4.0, 3.0, "Second")],
                recording=recording,
            ),
            MonoCut("none", 0.0, 1.0, 0, [], recording=recording),
            MonoCut(
                "fast", 0.0, 1.0, 0, [supervision("s4", 0.0, 1.0, "Fast")], recording=recording
            ).perturb_speed(1.1),
        ]
    )
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    good, dropped = found("lhotse", tmp_path / "cuts.jsonl.gz")
    assert rows(good) == [
        ("one", "hello there", "s", ""),
        ("s2", "first", "s", ""),
        ("s3", "second", "s", ""),
    ]
    assert [(i.utterance.offset, i.utterance.duration) for i in good] == [(1.0, 2.0), (3.5, 1.0), (7.0, 2.0)]
    assert [d.reason for d in dropped] == [
        "cut without a supervision",
        "recording is transformed on the fly; save its audio first",
    ]
    with pytest.raises(UsageError, match="no such file"):
        found("lhotse", tmp_path / "none.jsonl")
    for content in ('{"a": 1}\n', "no cuts\n"):
        (tmp_path / "other.jsonl").write_text(content)
        with pytest.raises(UsageError, match="has no lhotse cuts"):
            found("lhotse", tmp_path / "other.jsonl")


# What is checked of all


def test_checks_name_every_reason(tmp_path: Path) -> None:
    path = str(written(tmp_path / "a.wav", 2.0))
    broken = tmp_path / "b.wav"
    broken.write_bytes(b"RIFF")
    items = [
        Found(Utterance("good", path, 0.0, "fine")),
        Found(Utterance("good", path, 0.0, "again")),
        Found(Utterance("mute", path, 0.0, "")),
        Found(Utterance("broken", str(broken), 0.0, "text")),
        Found(Utterance("fast", path, 0.0, "x" * 51)),
        Found(Utterance("fits", path, 0.0, "x" * 50)),
        Found(Utterance("beyond", path, 1.0, "y", "", 1.5)),
        Found(Utterance("rounded", path, 1.05, "z", "", 1.0)),
        Dropped("its own reason", "item"),
    ]
    checks = list(checked(items))
    assert [i.utterance.id for i in checks if isinstance(i, Found)] == ["good", "fits", "rounded"]
    assert [i.utterance.duration for i in checks if isinstance(i, Found)] == [2.0, 2.0, 1.0]
    assert [i.reason for i in checks if isinstance(i, Dropped)] == [
        "duplicate id",
        "empty text",
        "unreadable audio",
        "longer than its frames can hold",
        "slice beyond the end of its file",
        "its own reason",
    ]
    assert "51 tokens, 50 frames" in checks[4].item


def test_manifests_by_split_and_nothing_left_on_failure(tmp_path: Path) -> None:
    path = str(written(tmp_path / "a.wav", 2.0))
    items = [
        Found(Utterance(f"u{i}", path, 0.0, "text", "s"), split) for i, split in enumerate(["b", "a", "b"])
    ]
    report = write_manifests(items, tmp_path / "m" / "x.jsonl")
    assert {p.name: s.utterances for p, s in report.manifests.items()} == {"x-a.jsonl": 1, "x-b.jsonl": 2}
    assert [u.id for u in Manifest(tmp_path / "m" / "x-b.jsonl", strict=True)] == ["u0", "u2"]
    write_manifests(items, tmp_path / "one.jsonl", splits=("b",))
    assert len(Manifest(tmp_path / "one.jsonl")) == 2
    with pytest.raises(UsageError, match=r"--split c: .* there are a, b"):
        write_manifests(items, tmp_path / "one.jsonl", splits=("b", "c"))
    with pytest.raises(UsageError, match=r"--split a: .* there are no parts"):
        write_manifests([Found(items[0].utterance)], tmp_path / "one.jsonl", splits=("a",))
    assert len(Manifest(tmp_path / "one.jsonl")) == 2  # as it was
    bad = [*items, Dropped("bad", "this one")]
    with pytest.raises(ImputerError, match="bad: this one"):
        write_manifests(bad, tmp_path / "n" / "x.jsonl", strict=True)
    assert not list((tmp_path / "n").iterdir())
    with pytest.raises(ImputerError, match=r"no utterance is left.*bad: this one"):
        write_manifests(bad[-1:], tmp_path / "n" / "x.jsonl")


@pytest.mark.parametrize("name", CORPORA)
def test_every_corpus_names_a_source_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="none"):
        list(CORPORA[name](tmp_path / "none", Options()))


# Letters to phonemes


DICTIONARY = """;;; of two vintages
'bout B AW1 T
axe AE1 K S
axe(2) AE1 K S IH0
CATTLE  K AE1 T AH0 L
aalborg AO1 L B AO0 R G # place, danish
a.m. EY2 EH1 M
w D AH1 B AH0 L Y UW0
ox AA1 K S
odd AA1 D Q
"""


def test_cmudict_spells_a_phoneme_a_character(tmp_path: Path) -> None:
    (tmp_path / "cmudict.dict").write_text(DICTIONARY)
    words, dropped = found("cmudict", tmp_path)
    assert {w.utterance.id: w.utterance.text for w in words} == {
        "'bout": "bWt",
        "axe": "@ks",
        "cattle": "k@tAl",
        "aalborg": "clbcrg",
        "ox": "aks",
    }
    assert {d.reason: d.item.split(":")[0] for d in dropped} == {
        "spelt with other marks than letters": "a.m.",
        "more phonemes than frames": "w",
        "not a pronunciation": f"{tmp_path / 'cmudict.dict'}, line 10",
    }
    assert len(set(PHONEMES.values())) == len(PHONEMES) == 39
    report = write_manifests(words, tmp_path / "words.jsonl")  # there is no audio to look for
    assert sum(s.utterances for s in report.manifests.values()) == 5
    assert {p.name for p in report.manifests} == {
        f"words-{part}.jsonl" for part in ("train", "valid", "test")
    }
    for word in (w for path in report.manifests for w in Manifest(path, strict=True)):
        frames = read_letters(word, torch.Generator())
        assert frames[::2, 0].tolist() == frames[1::2, 0].tolist()  # every letter for two frames
        assert "".join(LETTERS[int(n) - 1] for n in frames[::2, 0]) == word.id
        assert Letters(FrontEnd(), 8).feature_frames(word.duration) == len(frames)
    only, _ = found("cmudict", tmp_path / "cmudict.dict", splits=("test",))
    assert [w.utterance.id for w in only] == [w.utterance.id for w in words if w.split == "test"]
    (tmp_path / "none.txt").write_text(";;; nothing\n")
    with pytest.raises(UsageError, match="has no pronunciations"):
        found("cmudict", tmp_path / "none.txt")


# Real speech, where it is at hand


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("packs")
    for name in ("libri-dev-clean", "libri-test-clean-a", "audiomnist-40spk"):
        if not (DATA / f"{name}.tar").is_file():
            pytest.skip("../shared/data is not there")
        unpack(DATA / f"{name}.tar", folder, name)
    yield folder


@pytest.mark.data
@pytest.mark.parametrize(
    ("pack", "utterances", "speakers", "hours"),
    [
        ("libri-dev-clean", 2703, 40, 5.4),
        ("libri-test-clean-a", 1279, 20, 2.7),
        ("audiomnist-40spk", 6000, 40, 1.06),
    ],
)
def test_the_packs_are_read_as_they_unpack(
    packs: Path, tmp_path: Path, pack: str, utterances: int, speakers: int, hours: float
) -> None:
    report = write_manifests(CORPORA["folder"](packs / pack, Options()), tmp_path / "m.jsonl")
    (summary,) = report.manifests.values()
    assert not report.dropped
    assert (summary.utterances, len(summary.speakers)) == (utterances, speakers)
    assert summary.seconds / 3600 == pytest.approx(hours, abs=0.05)
    opened = Manifest(tmp_path / "m.jsonl", strict=True)
    for index in np.random.default_rng(0).choice(len(opened), 20, replace=False):
        one = opened[int(index)]
        samples = audio.read(one.audio_filepath, offset=one.offset, duration=one.duration)
        assert abs(len(samples) / RATE - one.duration) < 0.001
        assert one.text == lower(one.text) and one.text


@pytest.mark.data
def test_digit_strings_from_the_pack(packs: Path, tmp_path: Path) -> None:
    report = write_manifests(
        CORPORA["digits"](packs / "audiomnist-40spk", Options(audio_folder=tmp_path / "audio", strings=2)),
        tmp_path / "d.jsonl",
    )
    counts = {path.stem: summary.utterances for path, summary in report.manifests.items()}
    assert counts == {"d-train": 64, "d-valid": 8, "d-test": 8} and not report.dropped
