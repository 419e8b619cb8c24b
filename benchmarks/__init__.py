"""Timing ours against others, in turn within one run. What `crossshard bench` runs."""
