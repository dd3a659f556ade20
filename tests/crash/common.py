"""What the scripts of this folder share."""

import os


def private_sockets(work):
    """Sockets of services that are killed stay behind: here they go with the rest, and nobody has to sweep /tmp for them."""
    os.environ["XDG_RUNTIME_DIR"] = os.path.join(work, "run")
    os.mkdir(os.environ["XDG_RUNTIME_DIR"])
