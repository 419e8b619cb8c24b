"""Training end to end: text, model, loop, records and the proof. What `crossshard train` runs."""
