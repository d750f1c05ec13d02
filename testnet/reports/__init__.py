"""What a run is summed up in: report.json, report.html, several nodes' logs on one timeline."""
