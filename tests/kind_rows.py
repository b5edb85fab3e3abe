"""A few labelled rows for every kind of task."""

CONTEXT = "a list of numbers is in the file and the class has a name of its own"
ROWS = {
    "tag": [{"tokens": ["the", "list", str(i)], "tags": ["O", "B-X", "O"]} for i in range(14)],
    "answer": [{"question": f"what {i}", "context": CONTEXT * (1 + i % 3), "answers": ["list"]} for i in range(14)],
    "choose": [{"text": f"we {i}", "endings": ["ran", "a list", f"{i}"], "label": i % 3} for i in range(14)],
    "classify": [{"text": f"it is {i}", "label": "ab"[i % 2]} for i in range(14)],
    "pair": [{"text1": f"it is {i}", "text2": "so", "label": "ab"[i % 2]} for i in range(14)],
    "regress": [{"text": f"it is {i}", "label": i / 3} for i in range(14)],
}
