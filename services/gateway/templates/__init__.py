"""Chat templates: compiled and rendered by Jinja, in a process with limits on time and memory."""
