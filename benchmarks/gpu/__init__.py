"""The parts of `gpu_session.py`: a file with a function `run(plan, folder, figures)` each. `gpu_part.py` calls it."""
