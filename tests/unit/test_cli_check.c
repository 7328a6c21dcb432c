/* What `moesim check` prints of verdicts, which no scenario can be written for: the schedule is changed under
 * it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "sim/check/check.h"
#include "sim/cli/cli.h"
#include "tests/fixture.h"

/* The input of sim/cli/check.c: instead of a file, a schedule in which these ranks have this fault. */
static struct {
    const char *fault;
    int n, ranks[3];
} plan;

int moe_input_load(const struct moe_args *args, struct moe_input *in)
{
    (void)args;
    *in = (struct moe_input){.scenario = fixture_scenario(4, 2, "6", "")};
    in->schedule = fixture_schedule(in->scenario);
    in->routing = fixture_routing(in->scenario);
    for (int i = 0; i < plan.n; i++) fixture_mutate(in->schedule, plan.fault, plan.ranks[i]);
    return MOE_OK;
}

int moe_input_check_merged(const char *path)
{
    (void)path;
    return MOE_OK;
}

bool moe_input_is_trace(const char *path)
{
    (void)path;
    return false;
}

void moe_input_free(struct moe_input *in)
{
    moe_scenario_free(in->scenario);
    moe_schedule_free(in->schedule);
    moe_routing_free(in->routing);
}

int moe_check_stress(const struct moe_args *args)
{
    (void)args;
    fail_msg("not asked for");
    return MOE_OK;
}

void moe_input_print(const struct moe_input *in)
{
    printf("%d ranks\n", in->schedule->n_ranks);
}

json_t *moe_input_json(const struct moe_input *in)
{
    return json_integer(in->schedule->n_ranks);
}

/* What the command writes to standard output; *code out. To be freed. */
static char *run(bool json, int *code)
{
    char *text;
    size_t size;
    FILE *before = stdout;
    stdout = open_memstream(&text, &size);
    *code = moe_cli_check(&(struct moe_args){.json = json});
    fclose(stdout);
    stdout = before;
    return text;
}

static void test_text(void **state)
{
    (void)state;
    int code;
    plan.fault = "drop";
    plan.n = 1;
    plan.ranks[0] = 2;
    char *text = run(false, &code);
    assert_int_equal(code, 5);
    assert_ptr_equal(strstr(text, "error C2 ranks 2: layer 0 forward "), text);
    assert_non_null(strstr(text, "\n1 error: 4 ranks\n"));
    assert_null(strstr(text, "  C3"));
    free(text);
}

/* The same fault on several ranks is one verdict, with ranges of ranks. */
static void test_ranges_of_ranks(void **state)
{
    (void)state;
    int code;
    plan.fault = "scale";
    plan.n = 3;
    memcpy(plan.ranks, (int[]){0, 1, 3}, sizeof plan.ranks);
    char *text = run(false, &code);
    assert_int_equal(code, 5);
    assert_ptr_equal(strstr(text, "error C3 ranks 0-1,3: "), text);
    free(text);
}

static void test_json(void **state)
{
    (void)state;
    int code;
    const char *class, *severity, *op, *words;
    int errors, rank;
    plan.fault = "size";
    plan.n = 1;
    plan.ranks[0] = 2;
    char *text = run(true, &code);
    json_t *root = json_loads(text, 0, NULL);
    assert_int_equal(code, 5);
    assert_int_equal(json_unpack(root, "{s:i, s:[{s:s, s:s, s:[i!], s:[s!], s:s}!], s:[!]}", "errors",
                                 &errors, "verdicts", "class", &class, "severity", &severity, "ranks", &rank,
                                 "ops", &op, "text", &words, "proven"),
                     0);
    assert_int_equal(errors, 1);
    assert_string_equal(class, "C1");
    assert_string_equal(severity, "error");
    assert_int_equal(rank, 2);
    assert_non_null(strstr(op, "layer 0 forward "));
    assert_non_null(strstr(words, "sends"));
    json_decref(root);
    free(text);
}

/* Without an error, every class that the scenario asks for is listed with what it means; as JSON by name. */
static void test_proven(void **state)
{
    (void)state;
    int code;
    char line[256];
    plan.n = 0;
    char *text = run(false, &code), *names = run(true, &code);
    json_t *root = json_loads(names, 0, NULL), *proven = json_object_get(root, "proven");
    assert_int_equal(code, 0);
    size_t n = 0;
    for (int i = 0; i < moe_check_n_classes; i++) {
        int number = moe_check_classes[i].number;
        bool asked = number != 11 && number != 15; /* it limits no rows and has no checkpoint */
        snprintf(line, sizeof line, "  C%d %s\n", number, moe_check_classes[i].text);
        assert_int_equal(strstr(text, line) != NULL, asked);
        if (!asked) continue;
        snprintf(line, sizeof line, "C%d", number);
        assert_string_equal(json_string_value(json_array_get(proven, n++)), line);
    }
    assert_int_equal(json_array_size(proven), n);
    json_decref(root);
    free(text);
    free(names);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_ranges_of_ranks),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_proven),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
