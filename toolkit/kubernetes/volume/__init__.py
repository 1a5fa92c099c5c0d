"""Files of a run directory on the claim, which the machine that submits does not see."""

from toolkit.kubernetes.volume.files import Files
from toolkit.kubernetes.volume.reader import fetch, read_file
from toolkit.kubernetes.volume.transfers import placed, transfer

__all__ = ["Files", "fetch", "placed", "read_file", "transfer"]
