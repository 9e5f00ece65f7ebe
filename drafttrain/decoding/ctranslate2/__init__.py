"""Decoding by CTranslate2, a library in C++, of models converted by `models.ctranslate2`."""
