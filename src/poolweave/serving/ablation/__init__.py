"""CrossPool's ablation (its Table 3) on small random models: run it, and show it as table, picture and timeline."""

from poolweave.serving.ablation.report import AblationReport, CellReport
from poolweave.serving.ablation.run import CELLS, AblationConfig, run_ablation

__all__ = ["CELLS", "AblationConfig", "AblationReport", "CellReport", "run_ablation"]
