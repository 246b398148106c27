"""What fine-tuning gains on the speakers it was given, and loses on others: the table of docs/finetuning.md.

    python tools/measure_finetuning.py MANIFEST OTHERS -o runs/finetuning --minutes 5 10 20 [--model english]

MANIFEST holds the recordings of speakers outside the model's training data, OTHERS those of other people. Speakers are
added in random order until half of their recordings have the minutes to train on; the other half is the test set,
without the speakers that `finetune` holds out for its own validation. Nothing of the test set or of OTHERS is
seen by `finetune`. 5, 10 and 20 minutes take about 20 minutes of one core.

With --each-speaker every speaker of MANIFEST gets a model, trained on the minutes of that speaker alone and tested on
that speaker's other recordings; the errors of all speakers are added up.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from imputer.data import manifest
from imputer.data.manifest import Manifest, Utterance
from imputer.evaluation import Evaluation, compare, evaluate, spread
from imputer.recognizer import Recognizer
from imputer.training.finetuning import RUN, VALID_SHARE, finetune

TEST_SHARE = 0.5


def group(utterances: list[Utterance], minutes: float, seed: int) -> tuple[list[Utterance], list[Utterance]]:
    """(train, test): whole speakers in random order until the first part has the minutes and a validation set."""
    shuffled = random.Random(seed)
    speakers = sorted({utterance.speaker for utterance in utterances})
    shuffled.shuffle(speakers)
    train: list[Utterance] = []
    test: list[Utterance] = []
    for speaker in speakers:
        if sum(one.duration for one in train) >= 60 * minutes / (1 - VALID_SHARE):
            break
        own = [one for one in utterances if one.speaker == speaker]
        shuffled.shuffle(own)
        held_out = round(TEST_SHARE * len(own))
        test += own[:held_out]
        train += own[held_out:]
    return train, test


def row(before: Evaluation, after: Evaluation) -> str:
    difference = compare(before, after).difference
    relative = 100 * (after.wer.value / before.wer.value - 1)
    points = f"{100 * difference.value:+.1f} ({100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
    return f"{100 * before.wer.value:.1f} | {100 * after.wer.value:.1f} | {relative:+.1f} % | {points}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifest", type=Path)
    parser.add_argument("others", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[5.0, 10.0, 20.0])
    parser.add_argument("--model", default="english")
    parser.add_argument("--limit", type=int, default=120, help="utterances of OTHERS that are scored")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each-speaker", action="store_true", help="one model per speaker")
    options = parser.parse_args()
    torch.set_num_threads(1)
    others = spread(list(Manifest(options.others)), options.limit)
    start = Recognizer.from_pretrained(options.model)
    others_before = evaluate(start, others)
    print(
        "| minutes | scored on | words | before | after | relative | points (95 %) |\n|---|---|---|---|---|---|---|"
    )
    for minutes in options.minutes:
        everyone = list(Manifest(options.manifest))
        if options.each_speaker:
            groups = {
                name: alone(everyone, name, minutes, options.seed)
                for name in sorted({u.speaker for u in everyone})
            }
        else:
            groups = {"": group(everyone, minutes, options.seed)}
        scored: dict[str, list[tuple[Evaluation, Evaluation]]] = {"the same speakers": [], "others": []}
        for name, (train, test) in groups.items():
            folder = options.output / f"{minutes:g}-minutes{name and '-'}{name}"
            manifest.write(folder / "train.jsonl", train)
            report = finetune(options.model, folder / "train.jsonl", folder / "model", minutes=minutes)
            trained = {one.speaker for one in Manifest(folder / "model" / RUN / "train.jsonl")}
            test = [one for one in test if one.speaker in trained]
            tuned = Recognizer.from_pretrained(folder / "model")
            scored["the same speakers"].append((evaluate(start, test), evaluate(tuned, test)))
            scored["others"].append((others_before, evaluate(tuned, others)))
        for name, pairs in scored.items():
            before, after = (together(half) for half in zip(*pairs, strict=True))
            words = sum(one.words.length for one in before.utterances)
            print(f"| {report.minutes:.1f} | {name} | {words} | {row(before, after)} |", flush=True)


def alone(
    utterances: list[Utterance], speaker: str, minutes: float, seed: int
) -> tuple[list[Utterance], list[Utterance]]:
    """(train, test): one speaker's recordings in random order until there are the minutes and a validation set."""
    own = [one for one in utterances if one.speaker == speaker]
    random.Random(seed).shuffle(own)
    seconds, count = 0.0, 0
    while count < len(own) and seconds < 60 * minutes / (1 - VALID_SHARE):
        seconds, count = seconds + own[count].duration, count + 1
    return own[:count], own[count:]


def together(evaluations: Sequence[Evaluation]) -> Evaluation:
    """All their utterances as one evaluation; the same ones under several models are told apart by number."""
    everything = [
        replace(one, id=f"{number}-{one.id}")
        for number, each in enumerate(evaluations)
        for one in each.utterances
    ]
    return replace(evaluations[0], utterances=everything)


if __name__ == "__main__":
    main()
