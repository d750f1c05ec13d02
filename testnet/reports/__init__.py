"""Reports of a run: report.json, report.html, several nodes' logs on one timeline."""
