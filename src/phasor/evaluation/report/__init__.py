"""Reports of evaluations: a self-contained HTML page, charts as PNG and SVG, JSON, all in one folder."""

from phasor.evaluation.report import chinese as chinese
from phasor.evaluation.report.charts import Chart as Chart
from phasor.evaluation.report.charts import Curve as Curve
from phasor.evaluation.report.charts import Dot as Dot
from phasor.evaluation.report.charts import draw_curves as draw_curves
from phasor.evaluation.report.charts import draw_dots as draw_dots
from phasor.evaluation.report.charts import to_png as to_png
from phasor.evaluation.report.charts import to_svg as to_svg
from phasor.evaluation.report.folder import check_out as check_out
from phasor.evaluation.report.folder import write_report as write_report
from phasor.evaluation.report.page import Page as Page
from phasor.evaluation.report.page import Text as Text
from phasor.evaluation.report.page import light_color as light_color
from phasor.evaluation.report.provenance import provenance as provenance
