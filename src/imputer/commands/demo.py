"""`imputer demo`."""

from pathlib import Path
from typing import TYPE_CHECKING

from imputer.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = "about two minutes on two cores"


def demo(*, train: bool = False, keep: Path | None = None) -> None:
    """Show the shipped models decoding sample recordings, pass by pass; or train an Imputer.

    - imputer demo
    - imputer demo --train --keep tones

    Parameters
    ----------
    train
        Train a CTC expert and then an Imputer on generated audio: a language of tones.
    keep
        Keep the recordings, runs and models of --train in this folder.
    """
    if keep and not train:
        raise UsageError(f"--keep {keep} is for what --train makes: add --train")
    import tempfile

    from rich.console import Console

    from imputer import models

    console = Console()
    samples = sorted(models.SHIPPED.glob("*/sample.wav"))
    if samples and not train:
        show_models(console, samples)
    elif keep:
        train_one(console, keep)
    else:
        with tempfile.TemporaryDirectory(prefix="imputer-demo-") as folder:
            train_one(console, Path(folder))


def show_models(console: "Console", samples: list[Path]) -> None:
    """Transcribe the sample of every shipped model, and say what to try next."""
    from imputer.display import animation
    from imputer.recognizer import Recognizer

    for sample in samples:
        name = sample.parent.name
        console.rule(f"model {name}")
        try:
            recognizer = Recognizer.from_pretrained(name)
        except UsageError as missing:  # an extra that is not installed, and how to get it
            console.print(f"not shown: {missing}\n", highlight=False, markup=False, soft_wrap=True)
            continue
        transcript = recognizer.transcribe(str(sample), trace=True)
        animation.show(
            transcript, "a synthetic voice", block_size=recognizer.model.settings.block_size, console=console
        )
        widest = max(4, *(len(word.text) for word in transcript.words))
        console.print(f"\n   {'word':{widest}}   from     to  confidence", highlight=False)
        for word in transcript.words:
            console.print(
                f"   {word.text:{widest}}  {word.start:5.2f}  {word.end:5.2f}  {word.confidence:10.2f}",
                highlight=False,
            )
        console.print()
    console.print(
        "Try next:\n"
        "   imputer transcribe your.wav --show\n"
        "   imputer serve                  a page to drop recordings on\n"
        "   imputer demo --train           train an Imputer in about two minutes",
        highlight=False,
    )


def train_one(console: "Console", folder: Path) -> None:
    """The whole of the paper in small: expert, alignment, Imputer by dynamic programming, decoding."""
    from dataclasses import replace

    from imputer import configs, training
    from imputer.aligner.corpus import align_manifests
    from imputer.corpora import tones
    from imputer.data.manifest import Manifest
    from imputer.decoding import Options
    from imputer.display import animation
    from imputer.evaluation import evaluate
    from imputer.recognizer import Recognizer

    console.rule("Training an Imputer")
    console.print(
        "Audio of an invented language, where each letter is a gliding chord, is generated. A CTC expert "
        "learns it and aligns it; then an Imputer learns from masked alignments. "
        f"It takes {SECONDS}.\n"
    )
    trained_on = tones.make(folder / "train", 240)
    held_out = tones.make(folder / "test", 40, seed=1)
    settings = configs.read("tones")
    expert = replace(settings, data=replace(settings.data, train=(trained_on,), valid=(held_out,)))
    console.print("[bold]1. The CTC expert[/bold] is trained on recordings and texts, without times.")
    ctc = training.train(expert, folder / "expert")
    console.print("\n[bold]2. It aligns them[/bold]: which frame says which letter.")
    store = folder / "train.alignments"
    align_manifests([trained_on], store, ctc, batch_seconds=60.0)
    console.print("\n[bold]3. The Imputer[/bold] learns to complete alignments of which parts are masked.")
    imputer = training.train(
        replace(
            expert,
            rollin=configs.Rollin(alignments=str(store), block_size=8, noise="none"),
            vocabulary=replace(expert.vocabulary, tokenizer=str(folder / "expert" / "tokenizer.model")),
            training=replace(expert.training, objective="dynamic_programming"),
        ),
        folder / "imputer",
    )
    console.print("\n[bold]4. Recordings that are not in the training data[/bold], word error rates:")
    utterances = list(Manifest(held_out))
    for name, model, passes in (("CTC", ctc, 1), ("Imputer", imputer, 1), ("Imputer", imputer, 8)):
        recognizer = Recognizer.from_pretrained(model)
        wer = evaluate(recognizer, utterances, Options(passes)).wer.value
        console.print(
            f"   {name:8} {passes} pass{'es' if passes > 1 else '  '}  {100 * wer:5.1f} %", highlight=False
        )
    console.print(
        "\n[bold]5. How it writes[/bold]: one frame of each block of eight per pass, all blocks at once.\n"
    )
    longest = max(utterances, key=lambda utterance: utterance.duration)
    transcript = recognizer.transcribe(longest.audio_filepath, block_size=8, trace=True)
    animation.show(transcript, "a recording", block_size=8, console=console)
    console.print(f"\n   hypothesis:  {transcript.text}\n   reference:   {longest.text}\n")
    console.print(
        "Next: imputer train --help, and docs/training.md for your own recordings.", highlight=False
    )
