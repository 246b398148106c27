"""``python -m imputer``, also what torchrun starts."""

from imputer.cli import main

if __name__ == "__main__":
    main()
