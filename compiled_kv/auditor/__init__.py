"""The auditor: proves that a decode step compiles whole, and names the lines that keep it from that."""

from compiled_kv.auditor.audit import StepError, audit
from compiled_kv.auditor.findings import Finding, Report

__all__ = ["Finding", "Report", "StepError", "audit"]
