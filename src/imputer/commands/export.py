"""`imputer export`."""

from pathlib import Path


def export(model: str, output: Path, *, int8: bool = True, half: bool = False) -> None:
    """Write a model as ONNX, in float32 and int8, for `--runtime onnx` and `--runtime onnx-int8`.

    - imputer export english exported
    - imputer export runs/mine/model mine-half --half

    The folder holds encode.onnx (once per utterance) and impute.onnx (once per pass), both for any batch and any
    length, their int8 forms, and the model's configuration and tokenizer. The result is compared with torch.

    Parameters
    ----------
    model
        A model folder, or the name of a shipped model.
    output
        The folder to write.
    int8
        Also write encode.int8.onnx and impute.int8.onnx.
    half
        No ONNX: the model folder itself, its weights in float16. Half the size, to share or to ship.
    """
    if half:
        from imputer import models

        models.save(output, *models.load(models.torch_folder(model)), half=True)
        print(f"{output / models.WEIGHTS}  {(output / models.WEIGHTS).stat().st_size / 1e6:.1f} MB")
        return
    from imputer import models
    from imputer.runtimes import onnx

    differences = onnx.export(models.torch_folder(model), output, int8=int8)
    for path in sorted(output.glob("*.onnx")):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    print("largest difference from torch:", ", ".join(f"{part} {d:.1e}" for part, d in differences.items()))
