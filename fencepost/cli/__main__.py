"""`python -m fencepost.cli`: the fencepost command without its script."""

from fencepost.cli import main

if __name__ == "__main__":
    main()
