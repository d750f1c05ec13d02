"""Every schedule of the agreement and of a reduction's repair, within bounds."""
