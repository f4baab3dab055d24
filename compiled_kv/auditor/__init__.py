"""The auditor: proves that a decode step compiles whole, and names the lines that keep it from that."""

from compiled_kv.auditor.audit import StepError, audit
from compiled_kv.auditor.comparison import with_measured
from compiled_kv.auditor.findings import Finding, Report
from compiled_kv.auditor.measured import Measured
from compiled_kv.auditor.measuring import measure

__all__ = ["Finding", "Measured", "Report", "StepError", "audit", "measure", "with_measured"]
