/* simgrid_share.cc - see simgrid_share.h. Flow f goes from host "from f" to host "to f". */
#include "tests/oracle/simgrid_share.h"

#include <simgrid/s4u.hpp>
#include <string>
#include <vector>

namespace sg = simgrid::s4u;

/* Plain max-min: without TCP's window, its weights and its overheads, every rate solved anew at each event,
 * and times compared more closely than they are tested. */
static const char *const options[] = {"moesim",
                                      "--cfg=network/model:CM02",
                                      "--cfg=network/TCP-gamma:0",
                                      "--cfg=network/crosstraffic:no",
                                      "--cfg=network/latency-factor:1",
                                      "--cfg=network/bandwidth-factor:1",
                                      "--cfg=network/weight-S:0",
                                      "--cfg=network/optim:Full",
                                      "--cfg=surf/precision:1e-12",
                                      "--cfg=contexts/factory:thread",
                                      "--log=root.thres:warning",
                                      nullptr};

void simgrid_share(int n_links, const double *cap, int n_flows, const int *first, const int *path,
                   const double *bytes, const double *rate, double *finish_s)
{
    std::vector<char *> argv; /* SimGrid takes out what it has read */
    for (const char *option : options) argv.push_back(const_cast<char *>(option));
    int argc = int(argv.size()) - 1;
    sg::Engine engine(&argc, argv.data());
    sg::NetZone *zone = sg::create_full_zone("zone");
    std::vector<sg::Link *> link;
    std::vector<sg::Host *> from, to;
    for (int l = 0; l < n_links; l++)
        link.push_back(zone->create_link("link " + std::to_string(l), cap[l])->seal());
    for (int f = 0; f < n_flows; f++) {
        from.push_back(zone->create_host("from " + std::to_string(f), 1.0)->seal());
        to.push_back(zone->create_host("to " + std::to_string(f), 1.0)->seal());
        std::vector<sg::LinkInRoute> route;
        for (int i = first[f]; i < first[f + 1]; i++) route.emplace_back(link[path[i]]);
        if (rate[f] > 0) route.emplace_back(zone->create_link("rate " + std::to_string(f), rate[f])->seal());
        zone->add_route(from[f]->get_netpoint(), to[f]->get_netpoint(), nullptr, nullptr, route, false);
    }
    zone->seal();
    sg::Actor::create("all flows", from[0], [&] {
        std::vector<sg::CommPtr> flow;
        for (int f = 0; f < n_flows; f++)
            flow.push_back(sg::Comm::sendto_async(from[f], to[f], uint64_t(bytes[f])));
        for (int f = 0; f < n_flows; f++) {
            flow[f]->wait();
            finish_s[f] = flow[f]->get_finish_time();
        }
    });
    engine.run();
}
