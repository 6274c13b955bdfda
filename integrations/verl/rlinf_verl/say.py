"""The plugin's own lines in a job's output."""


def say(text: str) -> None:
    """Print a line of the plugin's own, as users look for decisions in the job's output."""
    print(f"[rlinf-plugins] {text}", flush=True)
