"""The names of tf.distribute: values per replica, cross-device ops, strategies."""
