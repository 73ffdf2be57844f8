"""What a rank does: build data, model and engine, restore, run the steps, evaluate, commit and export."""
