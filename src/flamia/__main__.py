"""``python -m flamia`` is the command ``flamia``."""

from flamia.cli import main

if __name__ == "__main__":
    main()
