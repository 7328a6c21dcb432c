/* number - a parameter of a model, as their tables list them: enough to read it, print it and fit it. */
#ifndef MOE_NUMBER_H
#define MOE_NUMBER_H

struct moe_number {
    const char *key, *unit; /* of YAML; what a value is printed in, "": a ratio */
    double size;            /* of the unit: 1e-6 for us */
    double least, most;     /* bounds of a fit, in seconds, bytes/s or as a ratio */
    const char *source;     /* of the default */
};

#endif
