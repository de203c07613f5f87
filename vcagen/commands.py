import sys
from collections.abc import Callable


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command; what a user or the machine got wrong becomes a line on stderr and exit code 1, Ctrl-C 130."""
    try:
        command()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
