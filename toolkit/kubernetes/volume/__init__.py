"""Files of a run directory on the claim, which the machine that submits does not see."""

from toolkit.kubernetes.volume.helper_pod import Files, fetch, placed, transfer

__all__ = ["Files", "fetch", "placed", "transfer"]
