"""Workers: what makes jobs go on. Tasks carry ids; SQL says what is to be done, a lease says who may do it."""
