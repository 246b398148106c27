"""Random kills, resumes and damage over a small training, until the time is up: `make soak`.

    python tools/soak.py --minutes 60 [--seed 0]

One training is run whole. Then, again and again, the same training runs in another folder and is killed at random
moments; between the runs something is damaged: a bit of a checkpoint, a file cut short, leftovers of a writer, a
recording deleted or emptied, a manifest edited, an alignment or a stale copy removed. Every round must end with
bit-identical weights, or be refused by an error that names what is wrong (then the damage is undone and the round goes
on). Anything else, a traceback or other weights, is a failure and ends the soak with code 1.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from imputer.commands import program
from imputer.corpora import tones

STEPS = 30
SETTINGS = f"""
[front_end]
channels = 4
[model]
width = 32
layers = 1
heads = 2
filter_size = 64
dropout = 0.1
[vocabulary]
units = "characters"
size = 9
[data]
train = ["data/manifest.jsonl"]
valid = ["data/manifest.jsonl"]
batch_seconds = 4
workers = 0
[rollin]
alignments = "data/train.alignments"
block_size = 4
[training]
steps = {STEPS}
average = 0.9
validate_every = 20
checkpoint_every = 5
keep_checkpoints = 3
log_every = 1
threads = 1
"""

Undo = Callable[[], None]
OUTPUT = Path("said.txt")
DROPPED = "dropped in this training: none"  # what a run says at its end if it used everything


def imputer(*words: str, kill_after: float | None = None) -> tuple[int, str]:
    """Exit code and what was said; killed with SIGKILL after a number of seconds.

    In a forked process: importing torch anew would take longer than the training.
    """
    child = os.fork()
    if not child:
        sys.argv = ["imputer", *words]
        with open(OUTPUT, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            program.main()
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    started, finished, status = time.monotonic(), 0, 0
    while not finished:
        time.sleep(0.02)
        if kill_after is not None and time.monotonic() - started > kill_after:
            os.kill(child, signal.SIGKILL)
        finished, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status), OUTPUT.read_text()


# --- damage: each does something to the run folder or the data, and returns how to undo it


def keep(*paths: Path) -> Undo:
    """Undo for changed or deleted files: their content now."""
    contents = {path: path.read_bytes() for path in paths if path.is_file()}

    def undo() -> None:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return undo


def some_file(folder: Path, pattern: str, chance: random.Random) -> Path | None:
    found = sorted(folder.glob(pattern))
    return chance.choice(found) if found else None


def flip_a_bit(run: Path, chance: random.Random) -> Undo | None:
    path = some_file(run / "checkpoints", "step-*.safetensors", chance)
    if path is None:
        return None
    undo, content = keep(path), bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return undo


def cut_a_checkpoint(run: Path, chance: random.Random) -> Undo | None:
    path = some_file(run / "checkpoints", "step-*.safetensors", chance)
    if path is None:
        return None
    undo = keep(path)
    os.truncate(path, chance.randrange(path.stat().st_size))
    return undo


def leave_parts(run: Path, chance: random.Random) -> Undo | None:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    (
        run / "checkpoints" / f".step-{chance.randrange(99):08d}.safetensors.{chance.randrange(9999)}.part"
    ).write_bytes(b"x")
    return lambda: None


def tear_metrics(run: Path, chance: random.Random) -> Undo | None:
    if not (run / "metrics.jsonl").is_file():
        return None
    os.truncate(run / "metrics.jsonl", chance.randrange((run / "metrics.jsonl").stat().st_size + 1))
    return lambda: None


def delete_audio(run: Path, chance: random.Random) -> Undo | None:
    if some_file(run / "checkpoints", "step-*.safetensors", chance) is None:
        return None  # it would be a new run on other data
    paths = sorted(Path("data").glob("*.wav"))
    chosen = paths if chance.random() < 0.5 else [chance.choice(paths)]
    undo = keep(*chosen)
    for path in chosen:
        path.unlink()
    return undo


def edit_the_manifest(run: Path, chance: random.Random) -> Undo | None:
    if some_file(run / "checkpoints", "step-*.safetensors", chance) is None:
        return None  # it would be a new run on other data
    path = Path("data/manifest.jsonl")
    undo, lines = keep(path), [json.loads(line) for line in path.read_text().splitlines()]
    edit = chance.randrange(4)
    if edit == 0:
        lines = lines[::-1]
    elif edit == 1:
        lines = lines[: len(lines) // 2]
    elif edit == 2:
        lines[0]["text"], lines[1]["text"] = lines[1]["text"], lines[0]["text"] + "a"
    else:
        lines[0]["duration"] *= 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return undo


def delete_alignments(run: Path, chance: random.Random) -> Undo | None:
    path = Path("data/train.alignments")
    undo = keep(path)
    path.unlink()
    return undo


def delete_stale_copies(run: Path, chance: random.Random) -> Undo | None:
    undo = keep(*(run / "stale").glob("*"))
    shutil.rmtree(run / "stale", ignore_errors=True)
    return undo


DAMAGES = {
    function.__name__: function
    for function in (
        flip_a_bit,
        cut_a_checkpoint,
        leave_parts,
        tear_metrics,
        delete_audio,
        edit_the_manifest,
        delete_alignments,
        delete_stale_copies,
    )
}


# --- the soak


def prepare(folder: Path) -> dict[str, list[str]]:
    """Data, an expert and its alignments; the command of each kind of training."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    tones.make("data", 24, words=(1, 2))
    Path("soak.toml").write_text(SETTINGS)
    base = ["train", "--config", "soak.toml"]
    must(*base, "-o", "expert", "--training.steps", "60")
    must(
        "align",
        "--manifest",
        "data/manifest.jsonl",
        "--model",
        "expert/model",
        "--store",
        "data/train.alignments",
    )
    imitate = [*base, "--vocabulary.tokenizer", "expert/model/tokenizer.model"]
    return {
        "ctc": base,
        "imitation": [*imitate, "--training.objective", "imitation"],
        "stale": [*imitate, "--training.objective", "dynamic_programming", "--rollin.refresh_every", "7"],
    }


def must(*words: str) -> float:
    """Run a command that has to succeed; the seconds it took."""
    started = time.monotonic()
    code, said = imputer(*words)
    if code:
        raise SystemExit(f"{' '.join(words)} ended with {code}: {said}")
    return time.monotonic() - started


def named(said: str) -> bool:
    """Whether the last line is an error of ours, and there is no traceback."""
    lines = said.strip().splitlines()
    return bool(lines) and bool(re.match("imputer: ", lines[-1])) and "Traceback" not in said


def soak_round(
    command: list[str], run: Path, whole: Path, seconds: float, chance: random.Random, counts: Counter
) -> str:
    """One training, killed and damaged on its way; "" or what went wrong."""
    shutil.rmtree(run, ignore_errors=True)
    for _ in range(chance.randrange(1, 5)):
        code, said = imputer(*command, "-o", str(run), kill_after=chance.uniform(0.3, 1.0) * seconds)
        counts["killed" if code == -signal.SIGKILL else "ended before the kill"] += 1
        if code not in (0, -signal.SIGKILL):
            return f"ended with {code} without damage: {said}"
        if chance.random() < 0.7 and (damage := chance.choice(list(DAMAGES))):
            undo = DAMAGES[damage](run, chance)
            if undo is None:
                continue
            counts[f"damage: {damage}"] += 1
            code, said = imputer(*command, "-o", str(run))
            if code == 0 and DROPPED not in said:
                counts["finished, reporting what was dropped"] += 1
                undo()
                shutil.rmtree(run)  # its weights may differ, and it said why
            elif code == 0:
                counts["finished in spite of it"] += 1
                if bad := compare(run, whole):
                    return f"after {damage}: {bad}: {said}"
                undo()
            elif named(said):
                counts["refused by name"] += 1
                undo()
            else:
                return f"after {damage} ended with {code}: {said}"
    code, said = imputer(*command, "-o", str(run))
    if code:
        return f"ended with {code} after the last damage was undone: {said}"
    return compare(run, whole)


def compare(run: Path, whole: Path) -> str:
    one, other = (folder / "model/model.safetensors" for folder in (run, whole))
    return "" if one.read_bytes() == other.read_bytes() else "the weights differ"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    until, chance = time.monotonic() + 60 * options.minutes, random.Random(options.seed)
    shutil.rmtree(options.folder, ignore_errors=True)
    commands = prepare(options.folder)
    seconds = {name: must(*command, "-o", f"whole-{name}") for name, command in commands.items()}
    counts: Counter = Counter()
    while time.monotonic() < until:
        name = chance.choice(list(commands))
        bad = soak_round(
            commands[name], Path(f"run-{name}"), Path(f"whole-{name}"), seconds[name], chance, counts
        )
        counts["rounds"] += 1
        if bad:
            print(f"{dict(counts)}\nround {counts['rounds']} ({name}): {bad}")
            raise SystemExit(1)
        counts["bit-identical"] += 1
    for what, number in sorted(counts.items()):
        print(f"{number:6d}  {what}")


if __name__ == "__main__":
    main()
