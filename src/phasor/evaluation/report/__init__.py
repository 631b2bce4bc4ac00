"""Reports of evaluations: a self-contained HTML page, charts as PNG and SVG, JSON, all in one folder."""

from phasor.evaluation.report.charts import Curve as Curve
from phasor.evaluation.report.charts import draw_curves as draw_curves
from phasor.evaluation.report.charts import to_png as to_png
from phasor.evaluation.report.charts import to_svg as to_svg
from phasor.evaluation.report.folder import check_out as check_out
from phasor.evaluation.report.folder import write_report as write_report
from phasor.evaluation.report.page import Page as Page
from phasor.evaluation.report.provenance import provenance as provenance
