"""Chats: messages to text, and which of the text the model is trained to generate.

``messages`` reads and checks the messages of a row. ``template`` renders them with the tokenizer's chat template.
``markers`` and ``rendered`` find where each message lies in the rendered text, ``turns`` where each answer begins and
ends, and ``stops`` the token at which the model stops. ``reasoning`` finds reasoning within content.
``renderer`` chooses what is trained on.
"""
