"""``python -m imputer``, also what torchrun starts."""

from imputer.commands.program import main

if __name__ == "__main__":
    main()
