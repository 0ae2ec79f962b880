"""One module per question. Each has `run(...) -> Run`; nothing is drawn here and nothing is printed but a progress bar."""
