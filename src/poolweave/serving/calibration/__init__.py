"""What this machine's operators and links cost, measured and fitted. Source: MemServe §6.2, Fig. 14."""

from poolweave.serving.calibration.calibration import Calibration, load_calibration
from poolweave.serving.calibration.config import CalibrateConfig

__all__ = ["CalibrateConfig", "Calibration", "load_calibration"]
