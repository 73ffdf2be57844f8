"""Chats: messages to text, and which of the text the model is trained to generate.

``messages`` reads and checks the messages of a row. ``template`` renders them with the tokenizer's chat template.
``markers`` and ``rendered`` find where each message lies in the rendered text, and ``turns`` where each answer begins
and stops.
``renderer`` chooses what is trained on.
"""
