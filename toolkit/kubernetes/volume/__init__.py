"""Files of a run directory on the claim, which the machine that submits does not see."""

from toolkit.kubernetes.volume.files import Files
from toolkit.kubernetes.volume.helper_pod import fetch, placed, transfer

__all__ = ["Files", "fetch", "placed", "transfer"]
